"""Pictures are cut to the shape of the video, and encoded into what each kind of model takes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from lowmem_core.errors import RequestError
from lowmem_core.families.wan.conditioning import image_condition, kept_frame, latent_shape
from lowmem_core.families.wan.images import EncodePlace, _fits, condition_on_images, fitted
from lowmem_core.shapes import VideoShape
from lowmem_core.tiny import tiny_wan_vae_tensors
from lowmem_core.vae import wan_vae_from_tensors

VIDEO = VideoShape(5, 32, 64)


@pytest.fixture(scope="module")
def vaes() -> dict[str, Any]:
    """Return a tiny VAE of each kind."""
    return {kind: wan_vae_from_tensors(tiny_wan_vae_tensors(kind, seed=1), torch.float32) for kind in ("2.1", "2.2")}


def ramp(height: int, width: int) -> Tensor:
    """Return a picture that brightens to the right, ``[1, H, W, 3]`` in 0..1."""
    return torch.linspace(0, 1, width).view(1, 1, width, 1).expand(1, height, width, 3)


def shape_in(vae: Any) -> Any:
    """Return the latent shape of the test video."""
    return latent_shape(VIDEO, vae.config.scale_factor_spatial, vae.config.z_dim)


def test_a_picture_of_the_right_size_keeps_its_bits() -> None:
    """Nothing is resampled without need."""
    picture = torch.rand(1, 32, 64, 3)
    assert torch.equal(fitted(picture, 32, 64), picture.movedim(-1, 1) * 2 - 1)


@pytest.mark.parametrize(("size", "edge"), [((32, 128), 0.5), ((64, 64), 1.0), ((96, 192), 1.0)])
def test_the_middle_of_a_picture_is_kept(size: tuple[int, int], edge: float) -> None:
    """Of a picture that is too wide both sides go; what is too high or too large keeps its width."""
    found = fitted(ramp(*size), 32, 64)
    assert found.shape == (1, 3, 32, 64)
    assert float(found[0, 0, 0, -1]) == pytest.approx(edge, abs=0.03)
    assert float(found[0, 0, 0, 0]) == pytest.approx(-edge, abs=0.03)


def test_alpha_and_further_pictures_are_left_out() -> None:
    """A batch with alpha gives its first picture."""
    picture = torch.rand(2, 32, 64, 4)
    assert torch.equal(fitted(picture, 32, 64), fitted(picture[0, :, :, :3], 32, 64))


@pytest.mark.parametrize("shape", [(32, 64), (1, 32, 64, 1), (1, 0, 64, 3)])
def test_what_is_no_picture_is_refused(shape: tuple[int, ...]) -> None:
    """The error says what a picture is."""
    with pytest.raises(RequestError, match="no picture"):
        fitted(torch.zeros(shape), 32, 64)


def test_each_vae_tells_what_its_models_take(vaes: dict[str, Any]) -> None:
    """The Wan 2.2 VAE keeps a frame; the Wan 2.1 VAE gives frames beside the latents."""
    picture = fitted(torch.rand(1, 32, 64, 3), 32, 64)
    beside = condition_on_images(vaes["2.1"], shape_in(vaes["2.1"]), picture, picture)
    kept = condition_on_images(vaes["2.2"], shape_in(vaes["2.2"]), picture)
    assert beside.kept_frame is None
    assert torch.equal(beside.image_condition, image_condition(vaes["2.1"], shape_in(vaes["2.1"]), picture, picture))
    assert kept.image_condition is None
    assert torch.equal(kept.kept_frame.latents, kept_frame(vaes["2.2"], shape_in(vaes["2.2"]), picture).latents)


def test_a_last_frame_is_no_matter_for_ti2v(vaes: dict[str, Any]) -> None:
    """It would be ignored silently."""
    picture = torch.zeros(1, 3, 32, 64)
    with pytest.raises(RequestError, match="first frame only"):
        condition_on_images(vaes["2.2"], shape_in(vaes["2.2"]), picture, picture)


def test_an_encode_that_does_not_fit_goes_to_the_processor(
    vaes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Slow is better than an out-of-memory, and the log says so."""
    vae = vaes["2.1"]
    with caplog.at_level(logging.INFO, "lowmem"):
        assert not _fits(vae, shape_in(vae), EncodePlace(torch.device("cuda"), 1 << 20))
    assert "on the processor" in caplog.text
    assert _fits(vae, shape_in(vae), EncodePlace(torch.device("cuda"), 1 << 30))
