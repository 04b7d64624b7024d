"""A tensor that has a shape but no memory, and is NaN wherever somebody reads it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return one element, NaN (0 for integers), expanded to ``shape``.

    Args:
        shape: Any shape, ``()`` and zero lengths included.
        dtype: Any dtype.
        device: Where the element is.
    """
    fill = float("nan") if dtype.is_floating_point else 0
    with torch.inference_mode(False):
        element = torch.full((), fill, dtype=torch.float32 if dtype.is_floating_point else dtype, device=device)
        return element.to(dtype).expand(tuple(shape))


def is_placeholder(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is one element expanded, so holds nothing of its own."""
    return tensor.numel() > 1 and not any(tensor.stride())
