"""Prompts to embeds: the UMT5 encoder of Wan, streamed, equal to diffusers' pipelines; and embeds that are kept."""

from .embeds import Embeds, read_embeds, write_embeds

__all__ = ["Embeds", "read_embeds", "write_embeds"]
