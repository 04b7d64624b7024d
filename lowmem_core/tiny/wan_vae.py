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
_HEAD_GAIN = 0.75
_ROUGHNESS = 0.08
_BIAS = 0.03
_COLOURS = 3
_WIDTH = 8


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
    "2.1": TinyKind("wan_2.1_vae_tiny.safetensors", _config(_WIDTH, 16, 1)),
    "2.2": TinyKind("wan2.2_vae_tiny.safetensors", _config(_WIDTH, 48, 2)),
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
    if name == "decoder.conv_out.bias":
        return torch.zeros(shape)
    if name.endswith(".bias"):
        return _BIAS * torch.randn(shape, generator=generator)
    rough = torch.randn(shape, generator=generator) / math.sqrt(math.prod(shape[1:]))
    return _gain_of(name) * (_mixing(name, shape, generator) * _blur(shape[2:]) + _ROUGHNESS * rough)


def _gain_of(name: str) -> float:
    """Return the scale of a convolution: branches a little weaker than what they are added to."""
    if name.startswith("decoder.conv_out"):
        return _HEAD_GAIN
    return _BRANCH_GAIN if ".conv2." in name or ".proj." in name else 1.0


def _mixing(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return how a convolution mixes channels, ``[out, in, 1, ...]``: at random, with two exceptions.

    The convolution that doubles time passes its channels on, because the first frame goes around it and would
    look unlike all others; the head of a folded picture gives the pixels of a square the same colour.
    The weights of each output sum to zero: activations are mostly positive, and their mean would grey the picture.
    """
    out_channels, in_channels = shape[:2]
    ones = [1] * (len(shape) - 2)
    if ".time_conv." in name:
        return torch.eye(in_channels).repeat(out_channels // in_channels, 1).view(*shape[:2], *ones)
    is_folded = name.startswith("decoder.conv_out") and out_channels > _COLOURS
    count = _COLOURS if is_folded else out_channels
    mixing = torch.randn(count, in_channels, generator=generator) / math.sqrt(in_channels)
    mixing = mixing - mixing.mean(dim=1, keepdim=True)
    return mixing.repeat_interleave(out_channels // count, dim=0).view(*shape[:2], *ones)


def _blur(sizes: tuple[int, ...]) -> Tensor:
    """Return a kernel of ``sizes`` that blurs in space: noise would give a noisy picture.

    In time most of the weight is on the present, with some on the past, so that causal caches matter.
    """
    blur = torch.ones(())
    for axis, size in enumerate(sizes):
        blur = blur.unsqueeze(-1) * _profile(size, is_time=len(sizes) == 3 and axis == 0)
    return blur


def _profile(size: int, is_time: bool) -> Tensor:
    """Return one side of a kernel: sums to one, centred in space, weighted to the last tap in time."""
    if size == 1:
        return torch.ones(1)
    return torch.tensor([0.03, 0.12, 0.85] if is_time else [0.25, 0.5, 0.25])
