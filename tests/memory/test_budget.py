"""What a budget accepts and what a ledger promises out of it."""

from __future__ import annotations

import threading

import pytest

from lowmem_core.errors import BudgetError, RequestError
from lowmem_core.memory import MemoryBudget, MemoryKind, MemoryLedger
from lowmem_core.units import MiB


@pytest.mark.parametrize("limits", [{"device_bytes": 0}, {"pinned_bytes": -1}, {"host_bytes": 0}])
def test_a_limit_must_be_positive(limits: dict[str, int]) -> None:
    """No memory at all is a mistake, and the error names the field."""
    with pytest.raises(RequestError, match=next(iter(limits))):
        MemoryBudget(**limits)


def test_reservations_nest_and_are_released() -> None:
    """The ledger lists what is held, remembers the peak of each kind and ends empty."""
    ledger = MemoryLedger(MemoryBudget(device_bytes=100))
    with ledger.reserve("weights", device=60, host=7), ledger.reserve("activations", device=40):
        assert [held.name for held in ledger.reservations()] == ["weights", "activations"]
        assert ledger.reserved(MemoryKind.DEVICE) == 100
    assert ledger.reservations() == ()
    assert ledger.peak == {MemoryKind.DEVICE: 100, MemoryKind.HOST: 7, MemoryKind.PINNED: 0}


@pytest.mark.parametrize("kind", ["device", "host", "pinned"])
def test_each_kind_is_refused_above_its_own_limit(kind: str) -> None:
    """A refusal holds nothing and says what is needed, what is free and who holds the rest."""
    ledger = MemoryLedger(MemoryBudget(**{f"{kind}_bytes": 10 * MiB}))
    with ledger.reserve("weights", **{kind: 8 * MiB}):
        with pytest.raises(BudgetError) as refusal, ledger.reserve("frames", **{kind: 3 * MiB}):
            pytest.fail("must not be entered")
        assert [held.name for held in ledger.reservations()] == ["weights"]
    assert "need 3.0 MiB" in str(refusal.value)
    assert "2.0 MiB free of 10.0 MiB" in str(refusal.value)
    assert "weights 8.0 MiB" in str(refusal.value)


def test_a_full_kind_does_not_refuse_another() -> None:
    """Host memory can still be reserved when the device is full."""
    ledger = MemoryLedger(MemoryBudget(device_bytes=5))
    with ledger.reserve("weights", device=5), ledger.reserve("cache", host=1 << 40):
        assert ledger.reserved(MemoryKind.HOST) == 1 << 40


def test_an_error_inside_releases() -> None:
    """Memory is given back whichever way the context is left."""
    ledger = MemoryLedger(MemoryBudget(device_bytes=5))
    with pytest.raises(KeyError), ledger.reserve("weights", device=5):
        raise KeyError
    assert ledger.reserved(MemoryKind.DEVICE) == 0


def test_an_abandoned_generator_releases() -> None:
    """A reservation inside a generator ends when the generator is closed."""
    ledger = MemoryLedger(MemoryBudget())

    def steps():
        with ledger.reserve("step", device=5):
            yield

    generator = steps()
    next(generator)
    assert ledger.reserved(MemoryKind.DEVICE) == 5
    generator.close()
    assert ledger.reserved(MemoryKind.DEVICE) == 0


def test_a_negative_size_is_refused() -> None:
    """A negative reservation would raise the limit for others."""
    with pytest.raises(RequestError, match="weights"), MemoryLedger(MemoryBudget()).reserve("weights", host=-1):
        pytest.fail("must not be entered")


def test_threads_never_pass_the_limit_together() -> None:
    """However many threads reserve at once, the peak stays in the budget and all is released."""
    ledger = MemoryLedger(MemoryBudget(device_bytes=3))

    def work() -> None:
        for _ in range(300):
            try:
                with ledger.reserve("step", device=1):
                    pass
            except BudgetError:
                continue

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= ledger.peak[MemoryKind.DEVICE] <= 3
    assert ledger.reservations() == ()
