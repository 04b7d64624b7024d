"""Requests of every kind of Wan model on tiny files, and what diffusers' pipelines make of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UniPCMultistepScheduler, WanImageToVideoPipeline, WanPipeline
from torch import Tensor

from lowmem_core.denoise import SamplerSettings
from lowmem_core.families.wan.conditioning import latent_shape
from lowmem_core.families.wan.images import condition_on_images
from lowmem_core.families.wan.load import load_wan_transformer
from lowmem_core.families.wan.models import WanFiles
from lowmem_core.families.wan.sampling import Conditioning, Guidance
from lowmem_core.pipeline import WanRequest
from lowmem_core.shapes import VideoShape
from lowmem_core.tiny import tiny_wan_vae_tensors, write_tiny_wan
from lowmem_core.vae import LatentStatistics, wan_vae_from_tensors

VIDEO = VideoShape(9, 32, 64)
STEPS, SHIFT, SEED = 3, 5.0, 7


def embeds(seed: int) -> Tensor:
    """Return seeded embeddings."""
    return torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(seed))


def picture() -> Tensor:
    """Return a seeded image in 0..1."""
    return torch.rand(1, 3, VIDEO.height, VIDEO.width, generator=torch.Generator().manual_seed(5))


def plain(path: Path) -> Any:
    """Return a transformer whose weights torch has allocated; those that map a file may lie at odd addresses."""
    module = load_wan_transformer(path).module
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()
    return module


class WanCases:
    """Tiny models and requests for them; a name is a kind, then ``two`` for two experts or ``image``.

    Args:
        folder: Where the models are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.vaes: dict[str, Any] = {
            kind: wan_vae_from_tensors(tiny_wan_vae_tensors(kind, seed=1), torch.float32) for kind in ("2.1", "2.2")
        }

    def path(self, name: str, expert: str = "high") -> Path:
        """Return the file of a transformer."""
        return self.folder / f"{name.split()[0]}_{expert}.safetensors"

    def vae(self, name: str) -> Any:
        """Return the VAE of a kind."""
        return self.vaes["2.2" if name.startswith("ti2v") else "2.1"]

    def request(self, name: str, **changes: Any) -> WanRequest:
        """Return a request."""
        vae = self.vae(name)
        shape = latent_shape(VIDEO, vae.config.scale_factor_spatial, vae.config.z_dim)
        condition, kept = None, None
        if name.startswith("i2v") or name.endswith("image"):
            condition, kept = condition_on_images(vae, shape, picture() * 2 - 1)
        base = WanRequest(
            files=WanFiles(self.path(name), self.path(name, "low") if name.endswith("two") else None),
            shape=shape,
            conditioning=Conditioning(embeds(1), embeds(2), None, condition, kept, kept is not None),
            sampler=SamplerSettings("unipc", STEPS, SHIFT),
            guidance=Guidance(4.0, 3.0 if name.endswith("two") else None),
            seed=SEED,
        )
        return replace(base, **changes)

    def diffusers_latents(self, name: str) -> Tensor:
        """Return what diffusers' pipeline makes of the request, as raw latents."""
        parts: dict[str, Any] = {"transformer": plain(self.path(name))}
        call: dict[str, Any] = {"guidance_scale": 4.0}
        if name.endswith("two"):
            parts["transformer_2"] = plain(self.path(name, "low"))
            parts["boundary_ratio"] = 0.9 if name.startswith("i2v") else 0.875
            call["guidance_scale_2"] = 3.0
        has_image = name.startswith("i2v") or name.endswith("image")
        call |= {"image": picture()} if has_image else {}
        pipeline: Any = WanImageToVideoPipeline if has_image else WanPipeline
        pipe = pipeline(
            tokenizer=None,
            text_encoder=None,
            vae=self.vae(name),
            scheduler=UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT
            ),
            expand_timesteps=name.startswith("ti2v"),
            **parts,
        )
        pipe.set_progress_bar_config(disable=True)
        latents: Tensor = pipe(
            height=VIDEO.height,
            width=VIDEO.width,
            num_frames=VIDEO.frames,
            num_inference_steps=STEPS,
            prompt_embeds=embeds(1),
            negative_prompt_embeds=embeds(2),
            generator=torch.Generator().manual_seed(SEED),
            output_type="latent",
            **call,
        ).frames
        return LatentStatistics.published(latents.shape[1]).denormalised(latents)


@pytest.fixture(scope="session")
def wan(tmp_path_factory: pytest.TempPathFactory) -> WanCases:
    """Write tiny models in float32, so that nothing rounds, and return the cases."""
    folder = tmp_path_factory.mktemp("models")
    for kind in ("t2v", "i2v", "ti2v"):
        for seed, expert in enumerate(("high", "low")):
            write_tiny_wan(folder, kind, seed=seed, name=f"{kind}_{expert}.safetensors", dtype=torch.float32)
    return WanCases(folder)
