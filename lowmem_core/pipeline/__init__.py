"""The stages put together: from a request to a result, under a budget.

The nodes, the shell and the benchmarks all call these functions; there is no other path.
"""

from .decode import BLENDED, DecodeReport, DecodeRequest, decode_to_mp4, meter_for, plan_for
from .saving import RunSaving
from .wan import denoise_wan
from .wan_plan import plan_wan
from .wan_request import WanReport, WanRequest

__all__ = [
    "BLENDED",
    "DecodeReport",
    "DecodeRequest",
    "RunSaving",
    "WanReport",
    "WanRequest",
    "decode_to_mp4",
    "denoise_wan",
    "meter_for",
    "plan_for",
    "plan_wan",
]
