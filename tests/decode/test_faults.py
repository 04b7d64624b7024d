"""What goes wrong during a decode: refused with a reason, or survived with the same bits."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from lowmem_core.decode import (
    DecodeServices,
    decode_frames,
    decode_samples,
    encode_moments,
    latent_shape_of,
    read_decoder,
)
from lowmem_core.decode import stages as stages_module
from lowmem_core.decode.causal import CausalCache
from lowmem_core.errors import BudgetError, BudgetExceededError, DeviceMemoryError, RequestError
from lowmem_core.host import PlainDevices
from lowmem_core.memory import LiveStorageMeter
from lowmem_core.place.resident import _residencies
from lowmem_core.plan import DecodePlan, plan_blended

OOM = torch.OutOfMemoryError


class Stopped(BaseException):
    """A host's own interruption."""


class StopAfter:
    """An interrupt that fires at the given check."""

    def __init__(self, checks: int) -> None:
        self._left = checks

    def check(self) -> None:
        """Count down."""
        self._left -= 1
        if self._left < 0:
            raise Stopped


@pytest.mark.parametrize(
    ("latents", "text"),
    [
        (torch.zeros(1, 48, 1, 4, 4), "Wan 2.2 TI2V"),
        (torch.zeros(2, 16, 1, 4, 4), "one by one"),
        (torch.zeros(1, 16, 0, 4, 4), "empty"),
        (torch.zeros(16, 4, 4), "not video latents"),
        (torch.full((1, 16, 1, 4, 4), float("nan")), "NaN"),
        (torch.zeros(1, 16, 1, 4, 4, dtype=torch.int64), "float"),
    ],
)
def test_latents_that_cannot_work_are_refused(make_case: Any, latents: torch.Tensor, text: str) -> None:
    """The error says what is wrong before anything is computed."""
    vae = make_case("2.1", torch.float32, 1, 2, 2).vae
    with pytest.raises(RequestError, match=text):
        latent_shape_of(latents, vae)


def test_a_budget_below_one_tile_names_the_smallest(small: Any) -> None:
    """The smallest budget named is enough, and a little less is not."""
    with pytest.raises(BudgetError) as refused:
        small.plan("auto", budget_bytes=1000)
    smallest = refused.value.smallest_bytes
    assert small.plan("auto", budget_bytes=smallest).planned_peak_bytes <= smallest
    with pytest.raises(BudgetError):
        small.plan("auto", budget_bytes=smallest // 2)


@pytest.mark.parametrize("tiling", ["off", "auto"])
def test_measured_is_within_planned_within_budget(small: Any, tiling: str) -> None:
    """The budget is enforced while running, and the plan is close to what is used."""
    off = small.plan("off")
    plan = off if tiling == "off" else small.plan("auto", budget_bytes=off.activation_peak_bytes * 2 // 3)
    limit = plan.planned_peak_bytes
    meter = LiveStorageMeter("cpu", limit_bytes=limit + sum(p.numel() * 4 for p in small.vae.parameters()))
    weights = 0
    services = DecodeServices(meter=meter, is_poisoned=True)
    for _ in decode_samples(small.latents, small.vae, plan, services):
        weights = weights or meter.live_bytes
    used = meter.peak_bytes - read_decoder(small.vae).weight_bytes
    assert 0.75 * limit <= used <= limit


def test_tiles_with_caches_on_the_device_keep_to_the_plan(wide: Any) -> None:
    """Tiles of several shapes in several stages take no more than planned, spares included."""
    plan = wide.plan(64 * wide.spec.patch)
    assert len({(t.extent.rows.size, t.extent.cols.size) for t in plan.stages[-1].tiles()}) > 1
    meter = LiveStorageMeter("cpu")
    for _ in decode_samples(wide.latents, wide.vae, plan, DecodeServices(meter=meter)):
        pass
    used = meter.peak_bytes - read_decoder(wide.vae).weight_bytes
    assert plan.has_device_caches
    assert 0.75 * plan.planned_peak_bytes <= used <= plan.planned_peak_bytes


def test_passing_the_limit_raises(small: Any) -> None:
    """A limit below what is live stops the run, whatever was planned."""
    services = DecodeServices(meter=LiveStorageMeter("cpu", limit_bytes=200_000))
    with pytest.raises(BudgetExceededError):
        list(decode_samples(small.latents, small.vae, small.plan("off"), services))


def test_out_of_memory_at_every_tile_keeps_the_bits(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One failure at any tile costs that tile and nothing else."""
    plan = small.plan(64 * small.spec.patch)
    expected = small.decode(plan)
    original = stages_module.StageRunner._run_piece
    for failing in range(2 * plan.tile_count):
        calls = iter(range(10_000))

        def run(self: Any, *args: Any, failing: int = failing, calls: Any = calls) -> None:
            original(self, *args)
            if next(calls) == failing:
                raise OOM("injected")

        monkeypatch.setattr(stages_module.StageRunner, "_run_piece", run)
        assert torch.equal(small.decode(plan), expected), failing


def test_repeated_out_of_memory_goes_on_in_pieces(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that fails twice is computed in pieces, with the same pixels up to rounding."""
    plan = small.plan(64 * small.spec.patch)
    original = stages_module.StageRunner._run_piece

    def run(self: Any, number: int, piece: Any, step: Any) -> None:
        size = self._tiles[number].extent
        if self._plan.start and piece.kept.area == size.area:
            raise OOM("injected")
        original(self, number, piece, step)

    monkeypatch.setattr(stages_module.StageRunner, "_run_piece", run)
    assert float((small.decode(plan) - small.reference).abs().max()) <= 4e-6


def test_hopeless_out_of_memory_says_so(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the foot of the ladder the error says need, have and remedy."""

    def fail(*_: Any) -> None:
        raise OOM("injected")

    monkeypatch.setattr(stages_module.StageRunner, "_run_piece", fail)
    with pytest.raises(DeviceMemoryError, match="Close"):
        small.decode(small.plan("off"))


def blended_plan(case: Any) -> DecodePlan:
    """Plan 2 x 2 overlapping tiles of a small case."""
    sides = {"tile_pixels": 8 * case.spec.scale, "stride_pixels": 6 * case.spec.scale}
    return plan_blended(case.spec, latent_shape_of(case.latents, case.vae), 4, **sides)


def test_out_of_memory_in_a_blended_tile_keeps_the_bits(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile runs again from the same state with the device cleared, whichever it is."""
    plan = blended_plan(small)
    expected = small.decode(plan)
    original = CausalCache.commit
    for failing in range(8):
        calls = iter(range(10_000))

        def commit(self: CausalCache, tile: int, failing: int = failing, calls: Any = calls) -> None:
            if next(calls) == failing:
                raise OOM("injected")
            original(self, tile)

        monkeypatch.setattr(CausalCache, "commit", commit)
        assert torch.equal(small.decode(plan), expected), failing
        assert next(calls) == 9


def test_hopeless_out_of_memory_in_a_blended_tile_names_another_tiling(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blended tiles are not cut for the user: their pixels would change."""

    def fail(*_: Any) -> None:
        raise OOM("injected")

    monkeypatch.setattr(CausalCache, "commit", fail)
    with pytest.raises(DeviceMemoryError, match='tiling to "auto"'):
        small.decode(blended_plan(small))


def test_too_little_free_memory_is_seen_before_a_tile(small: Any) -> None:
    """Free memory is checked first: some drivers spill to system memory instead of failing."""

    class Full(PlainDevices):
        asked = 0

        def free_bytes(self) -> int | None:
            return 1000

        def make_room(self, nbytes: int) -> None:
            Full.asked = nbytes

    with pytest.raises(DeviceMemoryError):
        small.decode(small.plan("off"), DecodeServices(devices=Full()))
    assert Full.asked > 1000


def test_an_interrupt_stops_at_a_tile_and_the_vae_is_as_before(small: Any) -> None:
    """The host's own exception passes, and the next decode is right."""
    before = [p.data_ptr() for p in small.vae.parameters()]
    with pytest.raises(Stopped):
        small.decode(small.plan("off"), DecodeServices(interrupt=StopAfter(1)))
    assert [p.data_ptr() for p in small.vae.parameters()] == before
    assert torch.equal(small.decode(small.plan("off")), small.reference)


def test_an_encode_between_two_chunks_changes_nothing(small: Any) -> None:
    """Decode and encode own their caches."""
    video = small.reference[:, :, :5].contiguous()
    parts = []
    for chunk in decode_frames(small.latents, small.vae, small.plan("off")):
        parts.append(chunk.frames)
        with torch.inference_mode():
            small.vae.encode(video)
    whole = small.reference[0].permute(1, 2, 3, 0).add(1.0).mul(0.5)
    assert torch.equal(torch.cat(parts), whole)


def test_streaming_encode_is_the_plain_encode(small: Any) -> None:
    """One latent frame at a time, bit for bit."""
    video = small.reference
    with torch.inference_mode():
        expected = small.vae.encode(video).latent_dist.parameters
    assert torch.equal(torch.cat(list(encode_moments(video, small.vae)), 2), expected)


def test_a_length_that_is_not_4k_plus_1_is_refused(small: Any) -> None:
    """Frames are never dropped silently."""
    with pytest.raises(RequestError, match="1 \\+ 4 k"):
        encode_moments(small.reference[:, :, :4], small.vae)


def test_two_decodes_in_two_threads_on_one_vae(small: Any) -> None:
    """Nothing is shared but the weights."""
    results: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        results[number] = small.decode(small.plan("off"))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[n], small.reference) for n in range(2))


def test_an_abandoned_iterator_gives_the_module_back(small: Any) -> None:
    """Closing half way restores every storage, also when the module had been moved."""
    before = [p.data_ptr() for p in small.vae.parameters()]
    chunks = decode_frames(small.latents, small.vae, small.plan("off"))
    next(chunks)
    chunks.close()
    assert [p.data_ptr() for p in small.vae.parameters()] == before


def test_two_decodes_of_one_vae_share_its_residency(small: Any) -> None:
    """The first to end must not take the weights from under the other: both hold the VAE's own modules."""
    first, second = (decode_frames(small.latents, small.vae, small.plan("off")) for _ in range(2))
    next(first)
    next(second)
    holders = [_residencies[module].holders for module in read_decoder(small.vae).modules]
    first.close()
    second.close()
    assert holders == [2, 2]
