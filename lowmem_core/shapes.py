"""Shapes of latents and videos, with the arithmetic between them.

A causal video VAE turns the first latent frame into one frame and each later one into four.
"""

from __future__ import annotations

from typing import NamedTuple

from .errors import RequestError

FRAMES_PER_LATENT = 4


def frames_of(latent_frames: int) -> int:
    """Return the number of video frames of ``latent_frames`` latent frames: ``1 + 4 (n - 1)``."""
    return 1 + FRAMES_PER_LATENT * (latent_frames - 1)


def latent_frames_of(frames: int) -> int:
    """Return the number of latent frames of ``frames`` video frames.

    Raises:
        RequestError: ``frames`` is not ``1 + 4 k``; encoding would silently drop the rest.
    """
    whole, rest = divmod(frames - 1, FRAMES_PER_LATENT)
    if frames < 1 or rest:
        lower = max(1, frames - rest) if frames >= 1 else 1
        raise RequestError(
            "a causal video VAE cannot encode this number of frames",
            need="1 + 4 k frames",
            have=f"{frames}",
            remedy=f"Use {lower} or {lower + FRAMES_PER_LATENT} frames.",
        )
    return 1 + whole


class VideoShape(NamedTuple):
    """Size of a video in frames and pixels."""

    frames: int
    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}x{self.frames}"


class LatentShape(NamedTuple):
    """Size of one video latent ``[1, channels, frames, height, width]``."""

    channels: int
    frames: int
    height: int
    width: int

    def video(self, scale: int) -> VideoShape:
        """Return the decoded size, for a VAE that enlarges each side ``scale`` times."""
        return VideoShape(frames_of(self.frames), self.height * scale, self.width * scale)
