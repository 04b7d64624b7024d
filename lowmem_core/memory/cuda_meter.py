"""Reading torch's own counters of a CUDA device."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch


class CudaMeter:
    """Measures what torch's allocator has handed out on one CUDA device, whoever in this process asked for it.

    Args:
        device: A CUDA device.
    """

    measured_by: str | None = "cuda"
    host_live_bytes: int | None = None
    host_peak_bytes: int | None = None

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = torch.device(device)

    @property
    def live_bytes(self) -> int | None:
        """Allocated bytes now."""
        return int(torch.cuda.memory_allocated(self.device))

    @property
    def peak_bytes(self) -> int | None:
        """The most allocated bytes since the last reset."""
        return int(torch.cuda.max_memory_allocated(self.device))

    @property
    def reserved_bytes(self) -> int | None:
        """Bytes that torch's allocator holds now."""
        return int(torch.cuda.memory_reserved(self.device))

    def measuring(self) -> AbstractContextManager[None]:
        """Do nothing: the device counts all the time."""
        return nullcontext()

    def host_allocation(self) -> AbstractContextManager[None]:
        """Do nothing: host memory is not on the device."""
        return nullcontext()

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do nothing: tensors on the device are counted already."""

    def reset_peak(self) -> None:
        """Start torch's peak counter of the device again."""
        torch.cuda.reset_peak_memory_stats(self.device)
