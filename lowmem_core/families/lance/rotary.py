"""Where tokens stand, in time, rows and columns, and the angles by which queries and keys are turned for it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .config import LanceConfig


class Rotation(NamedTuple):
    """What turns the queries and keys of some tokens.

    Attributes:
        cos: ``[n, 1, d]`` in the dtype that computes.
        sin: Likewise.
    """

    cos: Tensor
    sin: Tensor

    def applied(self, heads: Tensor) -> Tensor:
        """Return ``heads`` ``[n, H, d]`` turned; each product is rounded to their dtype, and so is the sum."""
        half = heads.shape[-1] // 2
        turned = torch.cat([-heads[..., half:], heads[..., :half]], dim=-1).mul_(self.sin)
        return (heads * self.cos).add_(turned)


def text_positions(first: int, count: int) -> Tensor:
    """Return ``[3, count]`` int64 of text: one number after the other, the same on all axes."""
    return torch.arange(first, first + count).expand(3, count)


def image_positions(first: int, height: int, width: int) -> Tensor:
    """Return ``[3, 2 + height * width]`` int64 of an image: its opening token, its latents row by row, its closing one.

    Args:
        first: Where the opening token stands: the length of what comes before.
        height: Rows of latents.
        width: Columns of latents.
    """
    start = first + 1
    rows = torch.arange(height).repeat_interleave(width)
    cols = torch.arange(width).repeat(height)
    latents = torch.stack([torch.zeros_like(rows), rows, cols]) + start
    opening = torch.full((3, 1), first)
    closing = torch.full((3, 1), start + max(height, width))
    return torch.cat([opening, latents, closing], dim=1)


def rotation_of(positions: Tensor, config: LanceConfig, dtype: torch.dtype, device: torch.device) -> Rotation:
    """Return what turns tokens at ``positions`` ``[3, n]``.

    The reference rounds its frequencies to the dtype of the model, which in bf16 moves them by up to 0.4 %: a model
    turned by more exact ones would give another image.
    """
    width = config.head_width
    exponents = torch.arange(0, width, 2, dtype=torch.int64).to(torch.float32) / width
    frequencies = (1.0 / config.rope_theta**exponents).to(dtype).to(device, torch.float32)
    angles = positions.to(device, torch.float32).unsqueeze(-1) * frequencies
    axes = [axis for axis, count in enumerate(config.mrope_sections) for _ in range(count)]
    picked = torch.stack([angles[axis, :, index] for index, axis in enumerate(axes)], dim=-1)
    doubled = torch.cat([picked, picked], dim=-1).unsqueeze(1)
    return Rotation(doubled.cos().to(dtype), doubled.sin().to(dtype))
