"""Tiny Wan VAEs with random latents, and the plain decode of each: the oracle of this folder."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lowmem_core.decode import DecodeServices, decode_samples, latent_shape_of, read_decoder
from lowmem_core.plan import DecodePlan, DecoderSpec, plan_decode
from lowmem_core.tiny.wan_vae import tiny_wan_vae_tensors
from lowmem_core.vae import wan_vae_from_tensors


class Case(NamedTuple):
    """A VAE, latents and what the VAE itself makes of them."""

    vae: Any
    latents: Tensor
    reference: Tensor
    spec: DecoderSpec

    def plan(self, tiling: str | int = "auto", budget_bytes: int | None = None) -> DecodePlan:
        """Plan a decode of these latents, weights left out."""
        shape = latent_shape_of(self.latents, self.vae)
        element_bytes = self.latents.dtype.itemsize
        return plan_decode(self.spec, shape, element_bytes, tiling, budget_bytes=budget_bytes)

    def decode(self, plan: DecodePlan, services: DecodeServices | None = None) -> Tensor:
        """Decode all, with released cache tensors filled with NaN."""
        services = services or DecodeServices(is_poisoned=True)
        return torch.cat(list(decode_samples(self.latents, self.vae, plan, services)), 2)


def build_case(kind: str, dtype: torch.dtype, frames: int, height: int, width: int) -> Case:
    """Build a tiny VAE of ``kind``, seeded latents, and the plain decode."""
    vae = wan_vae_from_tensors(tiny_wan_vae_tensors(kind, seed=1), dtype)
    shape = (1, vae.config.z_dim, frames, height, width)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    with torch.inference_mode():
        reference = vae.decode(latents).sample
    return Case(vae, latents, reference, read_decoder(vae).spec)


@pytest.fixture(scope="session")
def make_case() -> Any:
    """Return the function that builds a case."""
    return build_case


@pytest.fixture(scope="session", params=["2.1", "2.2"])
def wide(request: pytest.FixtureRequest) -> Case:
    """Four latent frames, cut into 3 x 3 tiles with partial edges by the tests; float32."""
    return build_case(request.param, torch.float32, 4, 17, 18)


@pytest.fixture(scope="session", params=["2.1", "2.2"])
def small(request: pytest.FixtureRequest) -> Case:
    """Two latent frames of one to four tiles; float32."""
    return build_case(request.param, torch.float32, 2, 9, 9)
