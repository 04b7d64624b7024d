"""Come back from an out-of-memory: see it, free what can be freed, and tell whether there is room.

An exception holds the frames it passed through, and so their tensors. ``survives`` therefore returns instead of
raising, and the caller tries again outside of any ``except``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from ..host import Devices
from ..units import format_bytes
from .causal import CausalCache

_OUT_OF_MEMORY_TEXTS = ("out of memory", "can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` says that an allocation failed, on any backend."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _OUT_OF_MEMORY_TEXTS)


def survives(step: Callable[[], None]) -> bool:
    """Run ``step`` and return whether it came to its end; False where memory ran out.

    Raises:
        Exception: Whatever else ``step`` raises.
    """
    try:
        step()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def has_room(devices: Devices, nbytes: int) -> bool:
    """Return whether ``nbytes`` are free, asking the host for them if not.

    It is asked before a tile, because some drivers spill to system memory instead of failing.
    """
    free = devices.free_bytes()
    if free is None or free >= nbytes:
        return True
    devices.make_room(nbytes)
    return (devices.free_bytes() or 0) >= nbytes


def clear_device(devices: Devices, cache: CausalCache, nbytes: int) -> None:
    """Free what can be freed: ``cache`` leaves the device, and the host is asked for ``nbytes``."""
    cache.move_to_host()
    gc.collect()
    devices.make_room(nbytes)


def free_words(devices: Devices) -> str:
    """Return the free bytes in words, for an error message."""
    free = devices.free_bytes()
    return "unknown" if free is None else f"{format_bytes(free)} free"
