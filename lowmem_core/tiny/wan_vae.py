"""Tiny Wan VAEs with the structure and the key names of the released ones, and weights drawn from a seed.

Residual blocks normalise what they read, and the head is preceded by a norm, so the contrast of the picture is
set by the scale of the last convolution alone and no calibration is run: a seed gives the same file everywhere.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import RequestError
from ..load import build_skeleton
from ..vae import WanVaeConfig
from ..weights import wan_vae_key_map

_BRANCH_GAIN = 0.7
_HEAD_GAIN = 0.9
_ROUGHNESS = 0.12


class TinyKind(NamedTuple):
    """One kind of tiny VAE."""

    file_name: str
    config: WanVaeConfig

    @property
    def scale(self) -> int:
        """How many times each side of a latent is enlarged."""
        return self.config.spatial_scale

    @property
    def z_dim(self) -> int:
        """Latent channels."""
        return self.config.z_dim


def _config(width: int, z_dim: int, patch_size: int) -> WanVaeConfig:
    """Return a released configuration at another width."""
    return WanVaeConfig(
        base_dim=width,
        decoder_base_dim=width,
        z_dim=z_dim,
        dim_mult=(1, 2, 4, 4),
        num_res_blocks=2,
        temporal_downsample=(False, True, True),
        is_residual=patch_size > 1,
        patch_size=patch_size,
        in_channels=3 * patch_size**2,
        out_channels=3 * patch_size**2,
    )


_KINDS = {
    "2.1": TinyKind("wan_2.1_vae_tiny.safetensors", _config(8, 16, 1)),
    "2.2": TinyKind("wan2.2_vae_tiny.safetensors", _config(8, 48, 2)),
}


def kind_of(kind: str) -> TinyKind:
    """Return the tiny VAE of ``kind``, ``"2.1"`` or ``"2.2"``.

    Raises:
        RequestError: There is no such kind.
    """
    if kind not in _KINDS:
        raise RequestError("there is no tiny Wan VAE of this kind", need=" or ".join(_KINDS), have=repr(kind))
    return _KINDS[kind]


def write_tiny_wan_vae(folder: Path | str, kind: str = "2.1", seed: int = 0) -> Path:
    """Write a tiny VAE with original key names, a few hundred kB to 2 MB.

    Args:
        folder: Where to write; made if needed.
        kind: ``"2.1"`` or ``"2.2"``.
        seed: Which weights.

    Returns:
        The file: ``wan_2.1_vae_tiny.safetensors`` or ``wan2.2_vae_tiny.safetensors``.

    Raises:
        RequestError: The kind is unknown.
    """
    from safetensors.torch import save_file

    path = Path(folder) / kind_of(kind).file_name
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tiny_wan_vae_tensors(kind, seed), str(path))
    return path


def tiny_wan_vae_tensors(kind: str = "2.1", seed: int = 0) -> dict[str, Tensor]:
    """Return the tensors of a tiny VAE by original name, float32 on the CPU.

    Raises:
        RequestError: The kind is unknown.
    """
    from diffusers import AutoencoderKLWan

    skeleton: Any = build_skeleton(AutoencoderKLWan, kind_of(kind).config.diffusers_arguments())
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}
    return {
        original: _draw(ours, shapes[ours], generator) for original, ours in sorted(wan_vae_key_map(skeleton).items())
    }


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return seeded values for the tensor that diffusers calls ``name``."""
    if name.endswith(".gamma"):
        return torch.ones(shape)
    if name.endswith(".bias"):
        return 0.1 * torch.randn(shape, generator=generator)
    return _gain_of(name) * _smooth_kernel(shape, generator)


def _gain_of(name: str) -> float:
    """Return the scale of a convolution: branches a little weaker than what they are added to."""
    if name.startswith("decoder.conv_out"):
        return _HEAD_GAIN
    return _BRANCH_GAIN if ".conv2." in name or ".proj." in name else 1.0


def _smooth_kernel(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return kernels that mix channels at random and blur in space: noise would give a noisy picture.

    In time most of the weight is on the present, with some on the past, so that causal caches matter.
    """
    mixing = torch.randn(*shape[:2], *[1] * (len(shape) - 2), generator=generator) / math.sqrt(shape[1])
    rough = torch.randn(shape, generator=generator) / math.sqrt(math.prod(shape[1:]))
    blur = torch.ones(())
    for axis, size in enumerate(shape[2:]):
        is_time = len(shape) == 5 and axis == 0
        blur = blur.unsqueeze(-1) * _profile(size, is_time)
    return mixing * blur + _ROUGHNESS * rough


def _profile(size: int, is_time: bool) -> Tensor:
    """Return one side of a kernel: sums to one, centred in space, weighted to the last tap in time."""
    if size == 1:
        return torch.ones(1)
    return torch.tensor([0.1, 0.25, 0.65] if is_time else [0.25, 0.5, 0.25])
