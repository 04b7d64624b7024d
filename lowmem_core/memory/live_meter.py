"""Counting the storages that operators leave alive, on any device, with a limit that holds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import BudgetExceededError
from ..units import format_bytes
from .allocator import CachingAllocator
from .observe import ObservingMode, tensors_in
from .storages import LiveStorages, Side


class _Watch(threading.local):
    """What one thread is inside of."""

    measuring = 0
    host = 0


class LiveStorageMeter:
    """Counts living storages made by operators inside ``measuring``, and tracked ones.

    Each storage counts once, however many views it has. What an operator is given from outside is never charged, nor
    are its views. Scratch memory inside one operator is not seen.

    Args:
        device: The device whose storages are charged to the device side; those of the CPU are the host's otherwise.
        limit_bytes: The most device bytes allowed; an operator that passes it raises, whatever was reserved.
        round_to: Device storages are charged in multiples of this many bytes.
        allocator: Also serves device storages from this allocator model.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        limit_bytes: int | None = None,
        *,
        round_to: int = 1,
        allocator: CachingAllocator | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.limit_bytes = limit_bytes
        self._allocator = allocator
        self._storages = LiveStorages(round_to, allocator)
        self._watch = _Watch()

    @property
    def measured_by(self) -> str | None:
        """The name of the method."""
        return "live-storage"

    @property
    def live_bytes(self) -> int:
        """Device bytes alive now."""
        return self._storages.live(Side.DEVICE)

    @property
    def peak_bytes(self) -> int:
        """The most device bytes alive after any operator since the last reset."""
        return self._storages.peak(Side.DEVICE)

    @property
    def reserved_bytes(self) -> int | None:
        """Bytes that the allocator model holds now, or None without one."""
        return None if self._allocator is None else self._allocator.reserved_bytes

    @property
    def host_live_bytes(self) -> int:
        """Host bytes alive now."""
        return self._storages.live(Side.HOST)

    @property
    def host_peak_bytes(self) -> int:
        """The most host bytes alive after any operator since the last reset."""
        return self._storages.peak(Side.HOST)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Watch the operators of this thread; entered again inside, it changes nothing."""
        self._watch.measuring += 1
        try:
            if self._watch.measuring > 1:
                yield
            else:
                with _StorageMode(self):
                    yield
        finally:
            self._watch.measuring -= 1

    @contextmanager
    def host_allocation(self) -> Iterator[None]:
        """Watch this thread and charge storages made inside to the host side."""
        self._watch.host += 1
        try:
            with self.measuring():
                yield
        finally:
            self._watch.host -= 1

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Charge existing storages while they live, each to the side of its device.

        Raises:
            BudgetExceededError: They are more than the limit allows.
        """
        for tensor in tensors:
            side = self._side(tensor)
            if side is not None:
                self._storages.charge(tensor.untyped_storage(), side)
        self._enforce("tracking existing tensors")

    def reset_peak(self) -> None:
        """Start the peaks again from what is alive now."""
        self._storages.reset_peak()

    def run_operator(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator and charge what it made; called by the dispatch mode."""
        for tensor in tensors_in((args, kwargs)):
            if self._side(tensor) is not None:
                self._storages.see(tensor.untyped_storage(), Side.EXTERNAL)
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            side = self._side(tensor)
            if side is not None:
                self._storages.see(tensor.untyped_storage(), side)
        self._enforce(str(func))
        return result

    def _side(self, tensor: torch.Tensor) -> Side | None:
        """Return who a new storage of ``tensor`` is charged to, or None if it cannot be counted."""
        if tensor.layout is not torch.strided:
            return None
        if self._is_ours(tensor.device):
            return Side.HOST if self._watch.host else Side.DEVICE
        return Side.HOST if tensor.device.type == "cpu" else None

    def _is_ours(self, device: torch.device) -> bool:
        own = self.device
        return device.type == own.type and (own.index is None or device.index is None or device.index == own.index)

    def _enforce(self, what: str) -> None:
        live = self.live_bytes
        if self.limit_bytes is not None and live > self.limit_bytes:
            raise BudgetExceededError(
                f"live memory on {self.device} passed its limit in {what}",
                need=f"{format_bytes(live)} ({live} bytes)",
                have=f"a limit of {format_bytes(self.limit_bytes)} ({self.limit_bytes} bytes)",
                remedy="The plan was wrong, which is a defect of LowMem: please report it with the plan.",
            )


class _StorageMode(ObservingMode):  # type: ignore[no-untyped-call]
    """Hands the operators of one thread to a meter."""

    def __init__(self, meter: LiveStorageMeter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter

    def observe(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func`` under the meter."""
        return self._meter.run_operator(func, args, kwargs)
