"""The memory a run may use, what is reserved of it, and what is really used.

Budget, ledger and report are plain values; the meters that need torch are loaded when first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .budget import MemoryBudget
from .host_memory import available_host_bytes
from .ledger import MemoryKind, MemoryLedger, Reservation
from .meter import MemoryMeter, NullMeter
from .phase_log import PhaseLog
from .report import MemoryReport, PhaseReport, format_table

if TYPE_CHECKING:
    from .allocator import CachingAllocator
    from .cuda_meter import CudaMeter
    from .live_meter import LiveStorageMeter
    from .process_meter import ProcessMeter
    from .simulated import SimulatedMeter, fake_module, is_simulated, simulation
    from .work import MultiplyAddCounter

__all__ = [
    "CachingAllocator",
    "CudaMeter",
    "LiveStorageMeter",
    "MemoryBudget",
    "MemoryKind",
    "MemoryLedger",
    "MemoryMeter",
    "MemoryReport",
    "MultiplyAddCounter",
    "NullMeter",
    "PhaseLog",
    "PhaseReport",
    "ProcessMeter",
    "Reservation",
    "SimulatedMeter",
    "available_host_bytes",
    "fake_module",
    "format_table",
    "is_simulated",
    "simulation",
]

_LAZY = {
    "CachingAllocator": "allocator",
    "CudaMeter": "cuda_meter",
    "LiveStorageMeter": "live_meter",
    "MultiplyAddCounter": "work",
    "ProcessMeter": "process_meter",
    "SimulatedMeter": "simulated",
    "fake_module": "simulated",
    "is_simulated": "simulated",
    "simulation": "simulated",
}


def __getattr__(name: str) -> Any:
    """Load a name that needs torch when it is first asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)
