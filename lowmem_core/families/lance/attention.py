"""Attention over what was read before and what is there now; it has no weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False) -> Tensor:
    """Return what each query gathers, ``[n, H * d]``.

    Args:
        query: ``[n, H, d]``.
        key: ``[m, K, d]`` with ``m >= n``; the last ``n`` belong to the tokens that ask.
        value: Like ``key``.
        causal: Whether a token sees only what stands before it, and itself.
    """
    groups = query.shape[1] // key.shape[1]
    mask = _lower_right(query.shape[0], key.shape[0], query.device) if causal else None
    found = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        _repeated(key, groups),
        _repeated(value, groups),
        attn_mask=mask,
    )
    return found[0].transpose(0, 1).reshape(query.shape[0], -1)


def _repeated(heads: Tensor, groups: int) -> Tensor:
    """Return ``[1, H, m, d]``: every head of keys once for each query it serves."""
    return heads.transpose(0, 1).repeat_interleave(groups, dim=0).unsqueeze(0)


def _lower_right(rows: int, cols: int, device: torch.device) -> Tensor:
    """Return ``[rows, cols]`` bool: the last row sees everything, each row above one less."""
    return torch.ones(rows, cols, dtype=torch.bool, device=device).tril(cols - rows)
