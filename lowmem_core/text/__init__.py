"""Prompts to embeds: the UMT5 encoder of Wan, streamed, equal to diffusers' pipelines; and embeds that are kept."""

from .cache import DEFAULT_CACHE_BYTES, EmbedsCache
from .embeds import Embeds, read_embeds, write_embeds
from .encode import DEFAULT_LIMIT_BYTES, EncodeOptions, TextPlan, encode_prompts, plan_text
from .load import LoadedTextEncoder, load_text_encoder
from .prompts import embed_prompts

__all__ = [
    "DEFAULT_CACHE_BYTES",
    "DEFAULT_LIMIT_BYTES",
    "Embeds",
    "EmbedsCache",
    "EncodeOptions",
    "LoadedTextEncoder",
    "TextPlan",
    "embed_prompts",
    "encode_prompts",
    "load_text_encoder",
    "plan_text",
    "read_embeds",
    "write_embeds",
]
