"""From the names in original Wan transformer files to the names of diffusers' ``WanTransformer3DModel``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache

WAN_PREFIXES = ("", "model.diffusion_model.", "diffusion_model.", "model.")
WAN_ORIGINAL_MARK = "blocks.0.self_attn.q.weight"
WAN_DIFFUSERS_MARK = "blocks.0.attn1.to_q.weight"

_ROOTS = {
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
    "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
    "head.modulation": "scale_shift_table",
    "head.head": "proj_out",
}
_BLOCK_PARTS = {
    "modulation": "scale_shift_table",
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
}
_ATTENTION_PARTS = {
    "q": "to_q",
    "k": "to_k",
    "v": "to_v",
    "o": "to_out.0",
    "k_img": "add_k_proj",
    "v_img": "add_v_proj",
    "norm_k_img": "norm_added_k",
}
_ATTENTIONS = {"self_attn": "attn1", "cross_attn": "attn2"}
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)\Z")
_ATTENTION = re.compile(r"(self_attn|cross_attn)\.([a-z_]+)(\..+)?\Z")


def wan_prefix_of(names: Iterable[str]) -> str | None:
    """Return what comes before the names of a Wan transformer's tensors, or None if there is no such transformer."""
    known = set(names)
    for prefix in WAN_PREFIXES:
        if prefix + WAN_ORIGINAL_MARK in known or prefix + WAN_DIFFUSERS_MARK in known:
            return prefix
    return None


def wan_diffusers_name(original: str) -> str:
    """Return diffusers' name of what an original file calls ``original``; other names, diffusers' own too, are kept.

    Args:
        original: The name of a tensor, or of a layer, without prefix: ``blocks.3.self_attn.q.weight``,
            ``blocks.3.self_attn.q``.
    """
    block = _BLOCK.match(original)
    if block is not None:
        return f"blocks.{block[1]}.{_block_part(block[2])}"
    return _renamed(original, _ROOTS)


def wan_original_name(ours: str) -> str:
    """Return what an original file calls the tensor, or layer, that diffusers calls ``ours``."""
    block = _BLOCK.match(ours)
    if block is not None:
        return f"blocks.{block[1]}.{_renamed(block[2], _original_parts())}"
    return _renamed(ours, {theirs: original for original, theirs in _ROOTS.items()})


@cache
def _original_parts() -> dict[str, str]:
    """Return the original name of every part of a block that is called otherwise by diffusers."""
    parts = {ours: theirs for theirs, ours in _BLOCK_PARTS.items()}
    for theirs, ours in _ATTENTIONS.items():
        parts |= {f"{ours}.{inner}": f"{theirs}.{part}" for part, inner in _ATTENTION_PARTS.items()}
        parts |= {f"{ours}.{norm}": f"{theirs}.{norm}" for norm in ("norm_q", "norm_k")}
    return parts


def _renamed(name: str, parts: Mapping[str, str]) -> str:
    """Return ``name`` with its beginning changed as ``parts`` say."""
    for part, renamed in parts.items():
        if name == part or name.startswith(part + "."):
            return renamed + name.removeprefix(part)
    return name


def _block_part(part: str) -> str:
    """Return our name of a part of a block."""
    attention = _ATTENTION.match(part)
    if attention is not None:
        inner = _ATTENTION_PARTS.get(attention[2], attention[2])
        return f"{_ATTENTIONS[attention[1]]}.{inner}{attention[3] or ''}"
    return _renamed(part, _BLOCK_PARTS)
