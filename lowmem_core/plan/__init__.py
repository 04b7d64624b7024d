"""Plans in plain integers: what will be where, and how many bytes that takes. No torch here."""

from .decode_plan import DecodePlan, plan_blended, plan_decode
from .decoder_spec import DecoderSpec, LayerKind, LayerSpec
from .stage_search import StagePlan
from .stream_plan import StreamPlan, WeightInventory, plan_stream

__all__ = [
    "DecodePlan",
    "DecoderSpec",
    "LayerKind",
    "LayerSpec",
    "StagePlan",
    "StreamPlan",
    "WeightInventory",
    "plan_blended",
    "plan_decode",
    "plan_stream",
]
