"""A module on a device for a while, and itself again afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowmem_core.errors import RequestError
from lowmem_core.place import OffloadMemory, copy_across, resident

CUDA = torch.device("cuda", 0)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
def test_parameters_move_and_come_back_as_the_same_storages() -> None:
    """The very same tensors are put back, also after an exception; no Parameter is replaced."""
    module = nn.Linear(3, 3)
    parameters, pointers = list(module.parameters()), [p.data_ptr() for p in module.parameters()]
    seen = []

    def fail() -> None:
        with resident(module, CUDA):
            seen.extend(p.device for p in module.parameters())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == [CUDA, CUDA]
    assert [p.data_ptr() for p in module.parameters()] == pointers
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))


@pytest.mark.gpu
@needs_gpu
def test_the_last_holder_restores() -> None:
    """Nested holders share one copy."""
    module = nn.Linear(2, 2)
    with resident(module, CUDA):
        with resident(module, CUDA):
            pass
        assert module.weight.device == CUDA
    assert module.weight.device.type == "cpu"


@pytest.mark.gpu
@needs_gpu
def test_two_devices_at_once_are_refused() -> None:
    """A module has one place."""
    module = nn.Linear(2, 2)
    with (
        resident(module, CUDA),
        pytest.raises(RequestError, match="another device"),
        resident(module, torch.device("cpu")),
    ):
        pass


def test_views_are_copied_exactly() -> None:
    """A strided crop arrives as it is."""
    memory = OffloadMemory(torch.device("cpu"))
    source = torch.randn(1, 5, 2, 6, 7)
    target = memory.on_host((1, 5, 2, 3, 3), torch.float32)
    copy_across(target, source[..., 1:4, 2:5])
    assert torch.equal(target, source[..., 1:4, 2:5])
