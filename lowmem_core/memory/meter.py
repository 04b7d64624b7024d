"""What every meter can do, and the meter that measures nothing."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class MemoryMeter(Protocol):
    """Measures the memory of a run. A figure that a meter cannot measure is None, never a guess.

    ``measuring`` is entered around each step of computation, on the thread that computes, and left before a generator
    yields: some meters watch a thread, and a generator's caller must not be watched.
    """

    @property
    def measured_by(self) -> str | None:
        """The name of the method, as reports state it, or None if nothing is measured."""

    @property
    def live_bytes(self) -> int | None:
        """Bytes in use on the device now."""

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes in use on the device at once since the last reset."""

    @property
    def reserved_bytes(self) -> int | None:
        """Bytes that the device's allocator holds now, in use or cached."""

    @property
    def host_live_bytes(self) -> int | None:
        """Bytes in use on the host side now."""

    @property
    def host_peak_bytes(self) -> int | None:
        """The most bytes in use on the host side at once since the last reset."""

    def measuring(self) -> AbstractContextManager[None]:
        """Measure while the context lasts; may be entered again inside."""

    def host_allocation(self) -> AbstractContextManager[None]:
        """Charge storages made inside to the host side, even where host and device are one machine."""

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Charge the storages of existing tensors, such as weights, while they live."""

    def reset_peak(self) -> None:
        """Start the peaks again from what is in use now."""


class NullMeter:
    """Measures nothing and costs nothing."""

    measured_by: str | None = None
    live_bytes: int | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    host_live_bytes: int | None = None
    host_peak_bytes: int | None = None

    def measuring(self) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def host_allocation(self) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Ignore the tensors."""

    def reset_peak(self) -> None:
        """Do nothing."""
