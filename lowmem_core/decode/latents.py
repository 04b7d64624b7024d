"""Check latents before anything is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RequestError
from ..memory import is_simulated
from ..shapes import LatentShape

_VAE_OF_CHANNELS = {16: "Wan 2.1", 48: "Wan 2.2 TI2V"}


def latent_shape_of(latents: Tensor, vae: nn.Module) -> LatentShape:
    """Return the size of ``latents`` after checking that ``vae`` can decode them.

    Args:
        latents: ``[1, C, F, H, W]``, or ``[1, C, H, W]`` for one frame.
        vae: The VAE.

    Raises:
        RequestError: Wrong rank, batch, channels, an empty side, or values that are not finite.
    """
    if latents.ndim not in (4, 5) or not latents.is_floating_point():
        raise RequestError(
            "these are not video latents",
            need="a float tensor [1, C, F, H, W] or [1, C, H, W]",
            have=f"{latents.dtype} {list(latents.shape)}",
        )
    sizes = list(latents.shape) if latents.ndim == 5 else [*latents.shape[:2], 1, *latents.shape[2:]]
    if 0 in sizes:
        raise RequestError("the latents are empty", need="at least one position", have=str(list(latents.shape)))
    if sizes[0] != 1:
        raise RequestError(
            "the latents are a batch",
            need="one video at a time",
            have=f"{sizes[0]}",
            remedy="Decode them one by one.",
        )
    tree: Any = vae
    channels = int(tree.config.z_dim)
    if sizes[1] != channels:
        fitting = _VAE_OF_CHANNELS.get(sizes[1])
        raise RequestError(
            "the latents do not belong to this VAE",
            need=f"{channels} channels",
            have=f"{sizes[1]}",
            remedy=f"They fit the {fitting} VAE." if fitting else "No Wan VAE has that many.",
        )
    if not is_simulated(latents) and not bool(torch.isfinite(latents).all()):
        raise RequestError(
            "the latents hold NaN or infinite values",
            need="finite values",
            have=f"{int((~torch.isfinite(latents)).sum())} that are not",
            remedy="The sampling run went wrong: try fp32 or bf16 instead of fp16 there.",
        )
    return LatentShape(*sizes[1:])
