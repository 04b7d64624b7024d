"""From the decoder's output channels to pixels."""

from __future__ import annotations

import torch
from torch import Tensor


def to_pixels(output: Tensor, patch: int) -> Tensor:
    """Turn the decoder's output channels into pixels clamped to -1..1."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

    return torch.clamp(unpatchify(output, patch_size=patch), min=-1.0, max=1.0)
