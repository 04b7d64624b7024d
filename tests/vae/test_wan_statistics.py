"""Latent statistics are the published ones and are applied as diffusers applies them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file

from lowmem_core.errors import CheckpointError, RequestError
from lowmem_core.load import build_skeleton
from lowmem_core.vae import LatentStatistics, denormalise, normalise

DATA = Path(__file__).resolve().parent.parent / "data"


def test_the_numbers_of_wan_21_are_those_of_diffusers() -> None:
    """Sixteen means and deviations."""
    config = build_skeleton(AutoencoderKLWan, {}).config
    assert LatentStatistics.published(16) == (tuple(config.latents_mean), tuple(config.latents_std))


def test_the_numbers_of_wan_22_are_those_of_lance() -> None:
    """Forty-eight means and deviations, as the reference of another project holds them."""
    reference = load_file(DATA / "lance_tiny_decode.safetensors")
    published = LatentStatistics.published(48)
    torch.testing.assert_close(torch.tensor(published.mean), reference["vae.mean"].float(), rtol=0, atol=2e-3)
    torch.testing.assert_close(torch.tensor(published.std), reference["vae.std"].float(), rtol=0, atol=4e-3)


def test_denormalise_has_the_bits_of_diffusers() -> None:
    """Division by the inverse is not multiplication: the order is that of the pipelines."""
    vae = build_skeleton(AutoencoderKLWan, {})
    latents = torch.randn(1, 16, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    mean = torch.tensor(vae.config.latents_mean).view(1, 16, 1, 1, 1)
    inverse = 1.0 / torch.tensor(vae.config.latents_std).view(1, 16, 1, 1, 1)
    assert torch.equal(denormalise(latents, vae), latents / inverse + mean)


def test_normalise_undoes_denormalise() -> None:
    """Encoding and decoding agree on what a normalised latent is, to rounding."""
    vae = build_skeleton(AutoencoderKLWan, {})
    latents = torch.randn(1, 16, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(normalise(denormalise(latents, vae), vae), latents)


def test_latents_of_another_vae_are_refused() -> None:
    """48 channels do not go into Wan 2.1."""
    with pytest.raises(RequestError, match="16"):
        denormalise(torch.ones(1, 48, 1, 2, 2), build_skeleton(AutoencoderKLWan, {}))


def test_a_number_of_channels_that_no_wan_vae_has_is_refused() -> None:
    """There are two kinds of Wan VAE."""
    with pytest.raises(CheckpointError, match="16 or 48"):
        LatentStatistics.published(4)


def test_statistics_of_another_length_are_refused() -> None:
    """A config.json beside weights of another VAE is noticed."""
    with pytest.raises(CheckpointError, match=r"config\.json"):
        LatentStatistics.of_config({"latents_mean": [0.0], "latents_std": [1.0]}, 16)
