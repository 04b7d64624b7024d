"""Decoded frames on their way from a VAE to a file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class FrameChunk:
    """Consecutive frames of one video.

    Attributes:
        frames: ``[F, H, W, 3]`` float32 RGB in 0..1 on the CPU.
        first_frame: Index of the first of them in the video.
    """

    frames: torch.Tensor
    first_frame: int

    @property
    def count(self) -> int:
        """Number of frames."""
        return int(self.frames.shape[0])


def to_uint8(frames: torch.Tensor) -> torch.Tensor:
    """Quantise float frames in 0..1 to uint8, rounding half to even; the shape is kept."""
    import torch

    return frames.mul(255.0).round_().clamp_(0.0, 255.0).to(torch.uint8)


class FrameHasher:
    """SHA-256 over the uint8 RGB frames of a video in order, fed chunk by chunk."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, chunk: FrameChunk) -> None:
        """Add the frames of ``chunk``."""
        self._hash.update(to_uint8(chunk.frames).contiguous().numpy().tobytes())

    def hexdigest(self) -> str:
        """Return the digest of what was added so far."""
        return self._hash.hexdigest()
