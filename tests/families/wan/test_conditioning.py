"""Noise, masks and encoded images equal what diffusers' pipelines prepare."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline
from torch import Tensor

from lowmem_core.errors import RequestError
from lowmem_core.families.wan.conditioning import (
    KeptFrame,
    image_condition,
    initial_noise,
    kept_frame,
    latent_shape,
)
from lowmem_core.shapes import LatentShape, VideoShape
from lowmem_core.tiny.wan_vae import tiny_wan_vae_tensors
from lowmem_core.vae import wan_vae_from_tensors

HEIGHT, WIDTH = 32, 64


@pytest.fixture(scope="module")
def vaes() -> dict[str, Any]:
    """Return a tiny VAE of each kind."""
    return {kind: wan_vae_from_tensors(tiny_wan_vae_tensors(kind, seed=1), torch.float32) for kind in ("2.1", "2.2")}


def picture(seed: int) -> Tensor:
    """Return a seeded image in -1..1."""
    return torch.rand(1, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def pipeline(kind: type, vae: Any, expand_timesteps: bool = False) -> Any:
    """Return a pipeline without models but the VAE."""
    parts = {"tokenizer": None, "text_encoder": None, "transformer": None, "scheduler": None}
    return kind(vae=vae, expand_timesteps=expand_timesteps, **parts)


def prepared(vae: Any, frames: int, last: Tensor | None = None, expand_timesteps: bool = False) -> Any:
    """Return what diffusers' image-to-video pipeline prepares, noise first."""
    pipe = pipeline(WanImageToVideoPipeline, vae, expand_timesteps)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        return pipe.prepare_latents(
            picture(0), 1, vae.config.z_dim, HEIGHT, WIDTH, frames, torch.float32, "cpu", generator, None, last
        )


def shape_of(vae: Any, frames: int) -> LatentShape:
    """Return the latent shape of the test size."""
    return latent_shape(VideoShape(frames, HEIGHT, WIDTH), vae.config.scale_factor_spatial, vae.config.z_dim)


@pytest.mark.parametrize(("kind", "frames"), [("2.1", 1), ("2.1", 9), ("2.2", 5)])
def test_noise_of_a_seed_is_that_of_diffusers(kind: str, frames: int, vaes: dict[str, Any]) -> None:
    """Also of a single image."""
    vae = vaes[kind]
    expected = pipeline(WanPipeline, vae).prepare_latents(
        1, vae.config.z_dim, HEIGHT, WIDTH, frames, torch.float32, "cpu", torch.Generator().manual_seed(3)
    )
    assert torch.equal(initial_noise(shape_of(vae, frames), 3), expected)


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
def test_any_seed_of_comfyui_can_be_used(seed: int) -> None:
    """Its nodes draw 64 bits without sign."""
    assert initial_noise(LatentShape(1, 1, 2, 2), seed).isfinite().all()


@pytest.mark.parametrize("frames", [1, 5, 9])
def test_a_first_frame_is_conditioned_as_in_diffusers(frames: int, vaes: dict[str, Any]) -> None:
    """Mask and latents, though the grey video is never built."""
    vae = vaes["2.1"]
    noise, expected = prepared(vae, frames)
    condition = image_condition(vae, shape_of(vae, frames), picture(0))
    assert condition.shape == (1, 20, *noise.shape[2:])
    assert torch.equal(condition, expected)


@pytest.mark.parametrize("frames", [5, 13])
def test_first_and_last_frame_are_conditioned_as_in_diffusers(frames: int, vaes: dict[str, Any]) -> None:
    """The last video frame is the fourth of its latent frame."""
    _, expected = prepared(vaes["2.1"], frames, picture(1))
    condition = image_condition(vaes["2.1"], shape_of(vaes["2.1"], frames), picture(0), picture(1))
    assert torch.equal(condition, expected)


def test_a_kept_frame_is_that_of_diffusers(vaes: dict[str, Any]) -> None:
    """Only the first frame is encoded, whatever the length."""
    _, latents, mask = prepared(vaes["2.2"], 9, expand_timesteps=True)
    kept = kept_frame(vaes["2.2"], shape_of(vaes["2.2"], 9), picture(0))
    assert torch.equal(kept.latents, latents)
    assert torch.equal(kept.mask, mask)


def test_a_kept_frame_stays_and_the_others_pass() -> None:
    """Exactly, both."""
    mask = torch.ones(1, 1, 2, 1, 1)
    mask[:, :, 0] = 0
    latents = torch.tensor([3.0, 4.0]).view(1, 1, 2, 1, 1)
    kept = KeptFrame(torch.full((1, 1, 1, 1, 1), 7.0), mask)
    assert kept.applied(latents).flatten().tolist() == [7.0, 4.0]


def test_encoding_in_bfloat16_gives_float32_conditions(vaes: dict[str, Any]) -> None:
    """The VAE rounds, what comes after does not."""
    vae = wan_vae_from_tensors(tiny_wan_vae_tensors("2.1", seed=1), torch.bfloat16)
    condition = image_condition(vae, shape_of(vae, 5), picture(0))
    assert condition.dtype == torch.float32
    assert torch.equal(condition, prepared(vae, 5)[1])


def test_encoding_can_be_stopped_between_latent_frames(vaes: dict[str, Any]) -> None:
    """The VAE can be used again at once."""
    calls = []

    def poll() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise InterruptedError

    vae = vaes["2.1"]
    with pytest.raises(InterruptedError):
        image_condition(vae, shape_of(vae, 13), picture(0), poll=poll)
    assert torch.equal(image_condition(vae, shape_of(vae, 5), picture(0)), prepared(vae, 5)[1])


@pytest.mark.parametrize(
    ("video", "message"),
    [
        (VideoShape(81, 485, 832), "multiples of 16; have 832x485. Use 832x480"),
        (VideoShape(81, 480, 843), "Use 848x480"),
        (VideoShape(81, 3, 480), "Use 480x16"),
        (VideoShape(80, 480, 832), "Use 77 or 81 frames"),
        (VideoShape(0, 480, 832), "Use 1 or 5 frames"),
    ],
)
def test_sizes_that_cannot_be_name_the_nearest(video: VideoShape, message: str) -> None:
    """Rounding in silence would give another video than was asked for."""
    with pytest.raises(RequestError, match=message):
        latent_shape(video, 8, 16)


def test_sizes_of_ti2v_are_multiples_of_32() -> None:
    """Its VAE enlarges twice as much."""
    assert latent_shape(VideoShape(121, 704, 1280), 16, 48) == (48, 31, 44, 80)
    with pytest.raises(RequestError, match="multiples of 32"):
        latent_shape(VideoShape(121, 720, 1280), 16, 48)


def test_images_and_vaes_that_do_not_fit_are_refused(vaes: dict[str, Any]) -> None:
    """Before anything is encoded."""
    vae = vaes["2.1"]
    with pytest.raises(RequestError, match="another size than the video"):
        image_condition(vae, shape_of(vae, 5), picture(0)[..., :-8])
    with pytest.raises(RequestError, match="no last frame"):
        image_condition(vae, shape_of(vae, 1), picture(0), picture(1))
    with pytest.raises(RequestError, match="of another model; need 16 latent channels; have 48"):
        image_condition(vaes["2.2"], shape_of(vae, 5), picture(0))
