"""From the names in original Wan text encoder files to the names of transformers' ``UMT5EncoderModel``."""

from __future__ import annotations

import re

UMT5_MARK = "encoder.block.0.layer.0.SelfAttention.q.weight"
UMT5_ORIGINAL_MARK = "blocks.0.attn.q.weight"

_ROOTS = {"token_embedding": "shared", "norm": "encoder.final_layer_norm"}
_BLOCK_PARTS = {
    "norm1": "layer.0.layer_norm",
    "attn": "layer.0.SelfAttention",
    "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
    "norm2": "layer.1.layer_norm",
    "ffn.gate.0": "layer.1.DenseReluDense.wi_0",
    "ffn.fc1": "layer.1.DenseReluDense.wi_1",
    "ffn.fc2": "layer.1.DenseReluDense.wo",
}
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)\Z")
_HF_BLOCK = re.compile(r"encoder\.block\.(\d+)\.(.+)\Z")


def umt5_name(original: str) -> str:
    """Return transformers' name of what an original file calls ``original``; other names are kept.

    Args:
        original: The name of a tensor, or of a layer: ``blocks.3.ffn.fc1.weight``, ``blocks.3.ffn.fc1``.
    """
    block = _BLOCK.match(original)
    if block is not None:
        return f"encoder.block.{block[1]}.{_renamed(block[2], _BLOCK_PARTS)}"
    return _renamed(original, _ROOTS)


def umt5_original_name(ours: str) -> str:
    """Return what an original file calls the tensor, or layer, that transformers calls ``ours``."""
    block = _HF_BLOCK.match(ours)
    if block is not None:
        longest_first = sorted(_BLOCK_PARTS.items(), key=lambda pair: -len(pair[1]))
        return f"blocks.{block[1]}.{_renamed(block[2], {theirs: original for original, theirs in longest_first})}"
    return _renamed(ours, {theirs: original for original, theirs in _ROOTS.items()})


def _renamed(name: str, parts: dict[str, str]) -> str:
    """Return ``name`` with its beginning changed as the first fitting one of ``parts`` says."""
    for part, renamed in parts.items():
        if name == part or name.startswith(part + "."):
            return renamed + name.removeprefix(part)
    return name
