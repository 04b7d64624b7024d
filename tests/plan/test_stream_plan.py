"""Placement of weights in plain integers: the limit holds, and errors name what would work."""

from __future__ import annotations

import pytest

from lowmem_core.errors import BudgetError, RequestError
from lowmem_core.plan import WeightInventory, plan_stream
from lowmem_core.plan.denoise_plan import Activations, plan_denoise
from lowmem_core.units import GiB, MiB

A14B = WeightInventory(496 * MiB, (670 * MiB,) * 40)
ACTIVE = Activations(1650 * MiB, 1970 * MiB)


@pytest.mark.parametrize("extra", [0, 1, 670 * MiB, 5000 * MiB, 26_000 * MiB])
def test_the_plan_keeps_its_limit_and_uses_it(extra: int) -> None:
    """What is on the device is at most the limit, and one more block would not fit."""
    limit = A14B.smallest_bytes + extra
    plan = plan_stream(A14B, limit)
    assert plan.device_bytes <= limit
    assert sorted(plan.resident + plan.streamed) == list(range(40))
    if plan.streamed:
        assert plan.device_bytes + 670 * MiB > limit


def test_resident_blocks_are_spread_out() -> None:
    """No two resident blocks are neighbours while there are fewer than streamed ones."""
    plan = plan_stream(A14B, A14B.smallest_bytes + 15 * 670 * MiB)
    assert len(plan.resident) == 15
    assert min(b - a for a, b in zip(plan.resident, plan.resident[1:], strict=False)) >= 2


def test_streaming_keeps_two_gib_by_default() -> None:
    """Without limits the weights of A14B take less than 2 GiB, slots and root included."""
    plan = plan_denoise([A14B, A14B], ACTIVE, "stream")
    assert plan.weight_bytes == 1836 * MiB <= 2 * GiB
    assert plan.shares_blocks
    assert plan.planned_peak_bytes == (1836 + 1970) * MiB


def test_a_device_limit_is_spent_on_resident_blocks() -> None:
    """With 8 GiB, blocks stay on the device until the limit is reached."""
    plan = plan_denoise([A14B], ACTIVE, "stream", 8 * GiB)
    assert len(plan.streams[0].resident) == 6
    assert 8 * GiB - 670 * MiB < plan.planned_peak_bytes <= 8 * GiB


def test_passes_run_one_at_a_time_when_two_do_not_fit() -> None:
    """Sharing is given up before the run is."""
    plan = plan_denoise([A14B], ACTIVE, "stream", A14B.smallest_bytes + 1700 * MiB)
    assert (plan.shares_blocks, plan.activation_bytes) == (False, 1650 * MiB)


@pytest.mark.parametrize("mode", ["resident", "stream"])
def test_an_impossible_budget_names_the_smallest(mode: str) -> None:
    """The budget that the error names works."""
    with pytest.raises(BudgetError) as caught:
        plan_denoise([A14B], ACTIVE, mode, 2 * GiB)
    smallest = caught.value.smallest_bytes
    assert plan_denoise([A14B], ACTIVE, mode, smallest).planned_peak_bytes <= smallest
    with pytest.raises(BudgetError):
        plan_denoise([A14B], ACTIVE, mode, smallest - 1)


def test_a_resident_run_that_cannot_fit_names_streaming() -> None:
    """The refusal says which mode fits, and does not change the mode."""
    with pytest.raises(BudgetError, match=r'Use memory mode "stream", which needs 3\.40 GiB'):
        plan_denoise([A14B], ACTIVE, "resident", 8 * GiB)


def test_a_weight_limit_is_strict() -> None:
    """A limit on weights alone is kept, or refused by name."""
    assert plan_denoise([A14B], ACTIVE, "stream", None, 3 * GiB).weight_bytes <= 3 * GiB
    with pytest.raises(BudgetError, match="slots"):
        plan_denoise([A14B], ACTIVE, "stream", None, GiB)


def test_an_unknown_mode_is_refused() -> None:
    """A mode that does not exist is an error that lists those that do."""
    with pytest.raises(RequestError, match="resident or stream"):
        plan_denoise([A14B], ACTIVE, "turbo")
