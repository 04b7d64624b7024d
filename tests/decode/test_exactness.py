"""The decode gives the pixels of the plain decode: bit for bit untiled, within rounding in tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lowmem_core.decode import DecodeServices, decode_frames, decode_samples, read_decoder
from lowmem_core.plan import plan_blended
from lowmem_core.shapes import LatentShape

TILE_PIXELS = {1: 64, 2: 128}  # by patch: eight latent positions


def levels(samples: Tensor) -> Tensor:
    """Return samples in -1..1 as whole levels of 8 bits."""
    return samples.float().add(1).mul(127.5).round()


def test_untiled_streaming_is_the_plain_decode(wide: Any) -> None:
    """One latent frame at a time, untiled: equal bit for bit."""
    assert torch.equal(wide.decode(wide.plan("off")), wide.reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["2.1", "2.2"])
def test_untiled_half_precision_is_the_plain_decode(make_case: Any, kind: str, dtype: torch.dtype) -> None:
    """Banded norms and upsampling without float32 keep every bit in half precision."""
    case = make_case(kind, dtype, 3, 3, 4)
    assert torch.equal(case.decode(case.plan("off")), case.reference)


def test_exact_tiles_have_no_seam(wide: Any) -> None:
    """3 x 3 tiles with partial edges over four latent frames: at most rounding apart from the whole frame."""
    plan = wide.plan(TILE_PIXELS[wide.spec.patch])
    assert all(stage.rows >= 3 and stage.cols >= 3 for stage in plan.stages[1:])
    tiled = wide.decode(plan)
    assert float((tiled - wide.reference).abs().max()) <= 4e-6
    apart = (levels(tiled) - levels(wide.reference)).abs()
    assert float(apart.max()) <= 1
    assert float((apart > 0).float().mean()) <= 1e-4


def test_exact_tiles_in_half_precision(make_case: Any) -> None:
    """In bf16 tiles keep every bit on the processor."""
    case = make_case("2.1", torch.bfloat16, 2, 10, 17)
    assert torch.equal(case.decode(case.plan(64)), case.reference)


def test_smaller_tiles_under_a_small_budget(wide: Any) -> None:
    """A budget below the canonical plan takes smaller tiles, says so, and stays within one level."""
    least = wide.plan("off").activation_peak_bytes // 3
    plan = wide.plan("auto", budget_bytes=least)
    assert not plan.is_canonical
    assert plan.planned_peak_bytes <= least
    assert float((wide.decode(plan) - wide.reference).abs().max()) <= 4e-6


def test_cache_placement_keeps_bits(wide: Any) -> None:
    """Caches in host memory give the bits of caches on the device."""
    with_room, without = wide.plan("off"), wide.plan("off", budget_bytes=wide.plan("off").activation_peak_bytes)
    assert (with_room.has_device_caches, without.has_device_caches) == (True, False)
    assert torch.equal(wide.decode(with_room), wide.decode(without))


@pytest.mark.parametrize("kind", ["2.1", "2.2"])
def test_blended_is_diffusers_tiled_decode(make_case: Any, kind: str) -> None:
    """Streamed blended tiles equal ``tiled_decode`` bit for bit."""
    case = make_case(kind, torch.float32, 2, 34 if kind == "2.1" else 18, 8)
    case.vae.enable_tiling()
    with torch.inference_mode():
        expected = case.vae.decode(case.latents).sample
    case.vae.disable_tiling()
    plan = plan_blended(case.spec, LatentShape(*case.latents.shape[1:]), 4)
    assert torch.equal(case.decode(plan), expected)


def test_a_vae_left_tiled_decodes_exactly_and_stays_tiled(small: Any) -> None:
    """Flags of a shared VAE are neither read nor changed."""
    small.vae.enable_tiling(32, 32, 24, 24)
    try:
        assert torch.equal(small.decode(small.plan("off")), small.reference)
        assert small.vae.use_tiling
    finally:
        small.vae.disable_tiling()
        small.vae.enable_tiling(256, 256, 192, 192)
        small.vae.disable_tiling()


def test_frames_are_in_order_in_zero_to_one(small: Any) -> None:
    """Chunks carry 1, then 4 frames, float32 RGB in 0..1, and are the reference's values."""
    chunks = list(decode_frames(small.latents, small.vae, small.plan("off"), DecodeServices()))
    assert [(c.first_frame, c.count) for c in chunks] == [(0, 1), (1, 4)]
    frames = torch.cat([c.frames for c in chunks])
    assert frames.dtype is torch.float32
    assert torch.equal(frames, small.reference[0].permute(1, 2, 3, 0).add(1.0).mul(0.5))


def test_one_frame_without_a_time_axis(small: Any) -> None:
    """``[1, C, H, W]`` is one frame."""
    chunks = list(decode_frames(small.latents[:, :, 0], small.vae, small.plan("off"), DecodeServices()))
    assert torch.equal(chunks[0].frames[0], small.reference[0, :, 0].permute(1, 2, 0).add(1.0).mul(0.5))


def test_the_whole_clip_is_never_held(small: Any) -> None:
    """The first chunk comes before the second is computed."""
    runs = decode_samples(small.latents, small.vae, small.plan("off"), DecodeServices())
    assert next(runs).shape[2] == 1
    runs.close()


def test_the_layers_cover_the_decoder(small: Any) -> None:
    """Every decoder weight belongs to what is moved to the device."""
    moved = {id(p) for p in read_decoder(small.vae).parameters()}
    wanted = {id(p) for n, p in small.vae.named_parameters() if n.startswith(("decoder.", "post_quant_conv."))}
    assert moved == wanted
