"""Where weights wait that are not on the device: in host memory if it can hold them, pinned if it may, else on disk."""

from __future__ import annotations

from ..memory import MemoryBudget, available_host_bytes

HOST = "host"
DISK = "disk"
_HOST_SHARE = 0.8
_PINNED_SHARE = 0.5


def weights_source(need_bytes: int, budget: MemoryBudget) -> str:
    """Return ``disk`` if host memory cannot hold ``need_bytes`` of weights, else ``host``."""
    have = budget.host_bytes
    if have is None:
        available = available_host_bytes()
        have = None if available is None else int(available * _HOST_SHARE)
    return DISK if have is not None and need_bytes > have else HOST


def may_pin(streamed_bytes: int, budget: MemoryBudget) -> bool:
    """Return whether all streamed blocks may lie in pinned memory."""
    have = budget.pinned_bytes
    if have is None:
        available = available_host_bytes()
        have = streamed_bytes if available is None else int(available * _PINNED_SHARE)
    return streamed_bytes <= have
