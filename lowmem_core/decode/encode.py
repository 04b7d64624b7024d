"""Streaming encode: one latent frame at a time, bit for bit the latents of ``AutoencoderKLWan.encode``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RequestError
from ..shapes import FRAMES_PER_LATENT, latent_frames_of


def encode_moments(video: Tensor, vae: nn.Module) -> Iterator[Tensor]:
    """Encode a video to the moments of its latents, one latent frame at a time.

    The causal cache is the encode's own list, so a decode on the same VAE is not disturbed.

    Args:
        video: ``[1, 3, F, H, W]`` in -1..1 on the VAE's device and in its dtype, ``F = 1 + 4 k``.
        vae: A diffusers ``AutoencoderKLWan``.

    Yields:
        ``[1, 2 z, 1, h, w]``: mean and log variance, as ``encode(video).latent_dist.parameters`` cut in time.

    Raises:
        RequestError: Not one video, or not ``1 + 4 k`` frames.
    """
    if video.ndim != 5 or video.shape[0] != 1 or 0 in video.shape:
        raise RequestError("cannot encode this", need="[1, 3, F, H, W]", have=str(list(video.shape)))
    count = latent_frames_of(int(video.shape[2]))
    tree: Any = vae
    scale = int(tree.config.scale_factor_spatial)
    if video.shape[-2] % scale or video.shape[-1] % scale:
        raise RequestError(
            "the sides do not divide",
            need=f"multiples of {scale}",
            have=f"{video.shape[-1]}x{video.shape[-2]}",
        )
    return _moments(video, tree, count)


def _moments(video: Tensor, vae: Any, count: int) -> Iterator[Tensor]:
    from diffusers.models.autoencoders.autoencoder_kl_wan import patchify

    cache: list[Any] = [None] * vae._cached_conv_counts["encoder"]
    for index in range(count):
        start = 0 if index == 0 else 1 + FRAMES_PER_LATENT * (index - 1)
        stop = 1 + FRAMES_PER_LATENT * index
        with torch.inference_mode():
            chunk = video[:, :, start:stop]
            if vae.config.patch_size is not None:
                chunk = patchify(chunk, patch_size=vae.config.patch_size)
            moments = vae.quant_conv(vae.encoder(chunk, feat_cache=cache, feat_idx=[0]))
        yield moments
