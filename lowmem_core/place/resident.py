"""A module on the device while a context lasts, and its own storages back afterwards.

Parameters are never replaced: their ``data`` is swapped for a device copy and the very same host tensor is put back,
so nothing is copied from the device and ties between parameters survive. Several contexts, also in several threads,
may hold one module: the first copies, the last restores.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..errors import RequestError


@dataclass
class _Residency:
    """Who holds a module, and the host tensors to put back."""

    device: torch.device
    holders: int = 0
    originals: list[tuple[Tensor, Tensor]] = field(default_factory=list)


_lock = threading.Lock()
_residencies: weakref.WeakKeyDictionary[nn.Module, _Residency] = weakref.WeakKeyDictionary()


@contextmanager
def resident(module: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """Keep all parameters and buffers of ``module`` on ``device`` while the context lasts.

    Raises:
        RequestError: Another context holds the module on another device.
    """
    with _lock:
        residency = _residencies.setdefault(module, _Residency(device))
        if residency.holders and residency.device != device:
            raise RequestError("the module is in use on another device", need=str(device), have=str(residency.device))
        residency.device = device
        if not residency.holders:
            _move_in(module, residency)
        residency.holders += 1
    try:
        yield module
    finally:
        with _lock:
            residency.holders -= 1
            if not residency.holders:
                _move_out(residency)


def _move_in(module: nn.Module, residency: _Residency) -> None:
    moved: dict[tuple[object, ...], Tensor] = {}
    try:
        for tensor in [*module.parameters(), *module.buffers()]:
            if _is_on(tensor, residency.device):
                continue
            data = tensor.data
            view = (data.untyped_storage()._cdata, data.storage_offset(), data.shape)
            if view not in moved:
                moved[view] = data.to(residency.device)
            residency.originals.append((tensor, data))
            tensor.data = moved[view]
    except BaseException:
        _move_out(residency)
        raise


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    """Return whether ``tensor`` is on ``device``; a device without an index is any of its type."""
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def _move_out(residency: _Residency) -> None:
    while residency.originals:
        tensor, data = residency.originals.pop()
        tensor.data = data
