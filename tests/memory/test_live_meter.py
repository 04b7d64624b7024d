"""Live storages are counted to the byte."""

from __future__ import annotations

import threading

import pytest
import torch

from lowmem_core.errors import BudgetExceededError
from lowmem_core.memory import LiveStorageMeter

N = 1000
SIZE = 4 * N


def test_temporaries_count_while_they_live() -> None:
    """``(x + 1) * 2`` holds two results at once, then one; the input is nobody's."""
    x, meter = torch.ones(N), LiveStorageMeter()
    with meter.measuring():
        y = (x + 1) * 2
    assert (meter.live_bytes, meter.peak_bytes) == (SIZE, 2 * SIZE)
    del y
    assert (meter.live_bytes, meter.peak_bytes) == (0, 2 * SIZE)


def test_views_and_in_place_operators_add_nothing() -> None:
    """A storage counts once and lives as long as its last view."""
    meter = LiveStorageMeter()
    with meter.measuring():
        y = torch.zeros(N)
        view = y.view(10, 100)[3]
        y.add_(1)
        torch.add(y, 1, out=y)
        del y
    assert (meter.live_bytes, meter.peak_bytes) == (SIZE, SIZE)
    assert view[0] == 2
    del view
    assert meter.live_bytes == 0


def test_views_of_outside_tensors_are_not_charged() -> None:
    """What is returned from a storage that existed before is no new memory."""
    x, meter = torch.ones(N), LiveStorageMeter()
    with meter.measuring():
        view, same = x.view(10, 100).t(), x.add_(1)
    assert (meter.peak_bytes, view.numel(), same is x) == (0, N, True)


def test_a_resized_storage_is_charged_its_new_size() -> None:
    """``resize_`` grows a storage in place."""
    meter = LiveStorageMeter()
    with meter.measuring():
        x = torch.empty(N)
        x.resize_(3 * N)
    assert meter.live_bytes == 3 * SIZE
    del x
    assert meter.live_bytes == 0


def test_tensors_that_autograd_keeps_are_alive() -> None:
    """``exp`` keeps its result for the backward pass, although the caller dropped it."""
    x, meter = torch.ones(N, requires_grad=True), LiveStorageMeter()
    with meter.measuring():
        total = x.exp().sum()
    assert meter.live_bytes == SIZE + 4
    del total
    assert meter.live_bytes == 0


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_composite_operators_are_seen_through(context: type) -> None:
    """Under both contexts the temporary inside ``einsum`` counts, though inference mode hides its parts."""
    a, b, meter = torch.ones(20, 30).t(), torch.ones(20, 30), LiveStorageMeter()
    with context(), meter.measuring():
        linear = torch.nn.functional.linear(torch.ones(5, 4, 30), b, torch.ones(20))
        made = torch.einsum("ij,jk->ik", a, b)
    assert meter.live_bytes == 4 * (linear.numel() + made.numel())
    peak = LiveStorageMeter()
    with context(), peak.measuring():
        torch.nn.functional.instance_norm(torch.ones(2, 3, N))
    assert peak.peak_bytes > 4 * 6 * N


def test_results_are_unchanged_by_measuring() -> None:
    """Measuring a convolution under inference mode changes no bit."""
    net = torch.nn.Sequential(torch.nn.Conv3d(3, 8, 3), torch.nn.SiLU(), torch.nn.Upsample(scale_factor=2))
    x, meter = torch.randn(1, 3, 5, 9, 9), LiveStorageMeter()
    with torch.inference_mode():
        expected = net(x)
        with meter.measuring():
            actual = net(x)
    assert torch.equal(expected, actual)


def test_tracked_weights_count_while_they_live() -> None:
    """Tied weights count once, views of them never, and a storage seen as an input before is charged."""
    weight, meter = torch.nn.Parameter(torch.ones(N)), LiveStorageMeter()
    with meter.measuring():
        weight.sum()
    meter.track([weight, weight, weight.view(10, 100)])
    meter.reset_peak()
    with meter.measuring():
        half = weight.detach()[: N // 2]
    assert (meter.live_bytes, meter.peak_bytes) == (SIZE, SIZE)
    del weight, half
    assert meter.live_bytes == 0


def test_swapped_parameter_data_is_followed() -> None:
    """A weight that goes to the device and back is charged between, as offloading does it."""
    weight, meter = torch.nn.Parameter(torch.ones(N)), LiveStorageMeter()
    host = weight.data
    with meter.measuring():
        weight.data = host.clone()
    assert meter.live_bytes == SIZE
    weight.data = host
    assert meter.live_bytes == 0


def test_host_allocations_are_another_side() -> None:
    """A storage stays on the side it was born on, also when it is used elsewhere; no outer context is needed."""
    meter = LiveStorageMeter()
    with meter.host_allocation():
        cache = torch.zeros(2 * N)
    with meter.measuring():
        work = torch.zeros(N)
        with meter.host_allocation():
            kept = work.clone()
        cache.add_(1)
        moved = cache[:N] + 1
    assert (meter.live_bytes, meter.host_live_bytes) == (2 * SIZE, 3 * SIZE)
    del cache, work, kept, moved
    assert (meter.live_bytes, meter.host_live_bytes, meter.host_peak_bytes) == (0, 0, 3 * SIZE)


def test_entries_nest_and_add_up() -> None:
    """Entering again inside counts nothing twice, and figures run on over many entries."""
    meter, kept = LiveStorageMeter(), []
    for _ in range(5):
        with meter.measuring(), meter.measuring():
            kept.append(torch.zeros(N))
    torch.zeros(N)
    assert (meter.live_bytes, meter.peak_bytes) == (5 * SIZE, 5 * SIZE)


def test_nothing_is_counted_outside() -> None:
    """A caller between two steps is not measured."""
    meter = LiveStorageMeter()
    with meter.measuring():
        pass
    kept = torch.zeros(N)
    assert (meter.live_bytes, kept.numel()) == (0, N)


def overrun(meter: LiveStorageMeter) -> str:
    """Hold three tensors at once and return the error, without the frames that keep them alive."""
    try:
        with meter.measuring():
            x = torch.zeros(N)
            y = x + 1
            return f"no error: {y * 2}"
    except BudgetExceededError as error:
        return str(error)


def test_the_limit_raises_from_the_operator() -> None:
    """The error names operator, live bytes and limit; afterwards the meter is clean and works on."""
    meter = LiveStorageMeter(limit_bytes=2 * SIZE)
    message = overrun(meter)
    assert "aten.mul" in message
    assert "12000 bytes" in message
    assert "8000 bytes" in message
    assert meter.live_bytes == 0
    with meter.measuring():
        z = torch.zeros(2 * N)
    assert meter.live_bytes == z.nbytes


def test_the_limit_holds_for_tracked_weights() -> None:
    """Weights above the limit are refused as well."""
    with pytest.raises(BudgetExceededError, match="tracking"):
        LiveStorageMeter(limit_bytes=SIZE - 1).track([torch.ones(N)])


def test_reused_identities_do_not_leak() -> None:
    """Thousands of short-lived storages, many at a former one's address, leave exactly nothing."""
    meter = LiveStorageMeter()
    with meter.measuring():
        for i in range(5000):
            x = torch.empty(i % 7 + 1)
            y = x[:1]
            del x
        del y
    assert (meter.live_bytes, meter.peak_bytes, len(meter._storages)) == (0, 4 * (7 + 6), 0)


def test_threads_are_measured_apart_and_counted_together() -> None:
    """Each thread that enters is watched, one that does not is not, and frees from anywhere count."""
    meter, kept = LiveStorageMeter(), []
    ready = threading.Barrier(3, timeout=20)

    def work(measured: bool) -> None:
        ready.wait()
        for _ in range(200):
            if measured:
                with meter.measuring():
                    kept.append(torch.zeros(N))
            else:
                kept.append(torch.zeros(N))

    threads = [threading.Thread(target=work, args=(measured,)) for measured in (True, True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meter.live_bytes == meter.peak_bytes == 400 * SIZE
    kept.clear()
    assert meter.live_bytes == 0
