"""Mean and standard deviation of each latent channel, published with the checkpoints.

Diffusion models see normalised latents. What ComfyUI passes between nodes is raw, so decoding takes raw
latents and never applies these numbers; whoever comes straight from a denoiser calls ``denormalise`` first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, RequestError

# fmt: off
_MEAN_16 = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)
_STD_16 = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)
_MEAN_48 = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557,
    -0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825,
    -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
    -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230,
    -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748,
    0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
)
_STD_48 = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013,
    0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978,
    0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093,
    0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887,
    0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)
# fmt: on
_PUBLISHED = {16: (_MEAN_16, _STD_16), 48: (_MEAN_48, _STD_48)}


class LatentStatistics(NamedTuple):
    """Mean and standard deviation per latent channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def published(cls, z_dim: int) -> LatentStatistics:
        """Return the numbers published for 16 (Wan 2.1) or 48 (Wan 2.2) channels.

        Raises:
            CheckpointError: No Wan VAE has ``z_dim`` latent channels.
        """
        if z_dim not in _PUBLISHED:
            raise CheckpointError("no Wan VAE has this many latent channels", need="16 or 48", have=f"{z_dim}")
        return cls(*_PUBLISHED[z_dim])

    @classmethod
    def of_config(cls, config: Mapping[str, Any], z_dim: int) -> LatentStatistics:
        """Return the numbers of a diffusers ``config.json``, or the published ones where it has none.

        Raises:
            CheckpointError: It has another number of them than the VAE has channels.
        """
        mean, std = config.get("latents_mean"), config.get("latents_std")
        if mean is None or std is None:
            return cls.published(z_dim)
        if len(mean) != z_dim or len(std) != z_dim:
            raise CheckpointError(
                "config.json is of another VAE", need=f"{z_dim} latents_mean and latents_std", have=f"{len(mean)}"
            )
        return cls(tuple(mean), tuple(std))

    def denormalised(self, latents: Tensor) -> Tensor:
        """Return what a VAE decodes, of what a denoiser makes: ``x / (1 / std) + mean``, with the bits of diffusers.

        Args:
            latents: ``[B, C, F, H, W]``, any device.

        Raises:
            RequestError: The latents have another number of channels.
        """
        mean, inverse_std = self._columns(latents)
        return latents / inverse_std + mean

    def normalised(self, latents: Tensor) -> Tensor:
        """Return what a denoiser sees, of what a VAE decodes: ``(x - mean) * (1 / std)``.

        Raises:
            RequestError: The latents have another number of channels.
        """
        mean, inverse_std = self._columns(latents)
        return (latents - mean) * inverse_std

    def _columns(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and inverse standard deviation as ``[1, C, 1, 1, 1]`` like ``latents``."""
        if latents.ndim != 5 or latents.shape[1] != len(self.mean):
            raise RequestError(
                "these latents are not of this VAE",
                need=f"[1, {len(self.mean)}, frames, height, width]",
                have=str(list(latents.shape)),
            )
        column = (1, len(self.mean), 1, 1, 1)
        return (
            torch.tensor(self.mean).view(column).to(latents.device, latents.dtype),
            1.0 / torch.tensor(self.std).view(column).to(latents.device, latents.dtype),
        )


def denormalise(latents: Tensor, vae: nn.Module) -> Tensor:
    """Turn what a denoiser makes into what a VAE decodes: ``x / (1 / std) + mean``, in the dtype of ``latents``.

    The order of operations is that of diffusers' pipelines, so that the bits are theirs.

    Args:
        latents: ``[B, C, F, H, W]``, normalised, any device.
        vae: An ``AutoencoderKLWan``.

    Raises:
        RequestError: The latents are of another VAE.
    """
    return _statistics_of(vae).denormalised(latents)


def normalise(latents: Tensor, vae: nn.Module) -> Tensor:
    """Turn what a VAE encodes into what a denoiser sees: ``(x - mean) * (1 / std)``, in the dtype of ``latents``.

    Args:
        latents: ``[B, C, F, H, W]``, raw, any device.
        vae: An ``AutoencoderKLWan``.

    Raises:
        RequestError: The latents are of another VAE.
    """
    return _statistics_of(vae).normalised(latents)


def _statistics_of(vae: Any) -> LatentStatistics:
    """Return the numbers of a VAE."""
    return LatentStatistics(tuple(vae.config.latents_mean), tuple(vae.config.latents_std))
