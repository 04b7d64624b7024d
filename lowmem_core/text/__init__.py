"""Prompts to embeds: the UMT5 encoder of Wan, streamed, equal to diffusers' pipelines; and embeds that are kept."""

from .embeds import Embeds, read_embeds, write_embeds
from .encode import EncodeOptions, TextPlan, encode_prompts, plan_text
from .load import LoadedTextEncoder, load_text_encoder

__all__ = [
    "Embeds",
    "EncodeOptions",
    "LoadedTextEncoder",
    "TextPlan",
    "encode_prompts",
    "load_text_encoder",
    "plan_text",
    "read_embeds",
    "write_embeds",
]
