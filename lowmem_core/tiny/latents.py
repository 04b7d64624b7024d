"""Small latents that decode to a calm, slowly moving picture."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from ..errors import RequestError
from ..shapes import latent_frames_of
from .wan_vae import kind_of

_WAVES = 3


def write_tiny_latents(folder: Path | str, kind: str, frames: int, height: int, width: int, *, seed: int = 0) -> Path:
    """Write latents of a video as ComfyUI's node for saving latents does.

    Args:
        folder: Where to write; made if needed.
        kind: ``"2.1"`` or ``"2.2"``, the VAE they are for.
        frames: Frames of the decoded video, ``1 + 4 k``.
        height: Height of the decoded video in pixels.
        width: Width of the decoded video in pixels.
        seed: Which video.

    Returns:
        The file, ``wan_<kind>_tiny_<width>x<height>x<frames>.latent``: ``latent_tensor`` is
        ``[1, C, F, H, W]`` float32.

    Raises:
        RequestError: The kind is unknown, or the size is not one that the VAE can decode to.
    """
    from safetensors.torch import save_file

    tiny = kind_of(kind)
    if height < 1 or width < 1 or height % tiny.scale or width % tiny.scale:
        raise RequestError(
            f"a Wan {kind} VAE cannot decode to this size",
            need=f"height and width that are multiples of {tiny.scale}",
            have=f"{width}x{height}",
        )
    shape = (latent_frames_of(frames), height // tiny.scale, width // tiny.scale)
    latents = _smooth_latents(tiny.z_dim, shape, seed)
    path = Path(folder) / f"wan_{kind}_tiny_{width}x{height}x{frames}.latent"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"latent_tensor": latents, "latent_format_version_0": torch.tensor([])}, str(path))
    return path


def _smooth_latents(channels: int, shape: tuple[int, int, int], seed: int) -> Tensor:
    """Return ``[1, channels, *shape]`` of unit scale: in every channel a few long waves that drift with time."""
    generator = torch.Generator().manual_seed(seed)
    frames, height, width = shape
    time = torch.arange(frames).view(1, -1, 1, 1)
    y = (torch.arange(height) / height).view(1, 1, -1, 1)
    x = (torch.arange(width) / width).view(1, 1, 1, -1)
    total = torch.zeros(channels, frames, height, width)
    for _ in range(_WAVES):
        draw = torch.rand(4, channels, 1, 1, 1, generator=generator)
        across, down, drift, phase = 4 * draw[0] - 2, 4 * draw[1] - 2, 0.16 * draw[2] - 0.08, draw[3]
        total += torch.sin(2 * math.pi * (across * x + down * y + drift * time + phase))
    return (total * math.sqrt(2 / _WAVES)).unsqueeze(0).contiguous()
