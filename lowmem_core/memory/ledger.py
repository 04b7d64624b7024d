"""What has been promised out of a budget: every long-lived use of memory reserves before it allocates."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from ..errors import BudgetError, RequestError
from ..units import format_bytes
from .budget import MemoryBudget


class MemoryKind(Enum):
    """Where bytes are."""

    DEVICE = "device"
    HOST = "host"
    PINNED = "pinned"


@dataclass(frozen=True, eq=False)
class Reservation:
    """Bytes held under a name."""

    name: str
    device: int = 0
    host: int = 0
    pinned: int = 0

    def of(self, kind: MemoryKind) -> int:
        """Return the reserved bytes of one kind."""
        return {MemoryKind.DEVICE: self.device, MemoryKind.HOST: self.host, MemoryKind.PINNED: self.pinned}[kind]


class MemoryLedger:
    """Named reservations within a budget, safe to use from several threads.

    Args:
        budget: The limits; a kind without a limit is only counted.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self.budget = budget
        self._lock = threading.Lock()
        self._held: list[Reservation] = []
        self._peak = dict.fromkeys(MemoryKind, 0)

    @property
    def peak(self) -> dict[MemoryKind, int]:
        """The most bytes reserved at once, per kind."""
        with self._lock:
            return dict(self._peak)

    def reserved(self, kind: MemoryKind) -> int:
        """Return the bytes of ``kind`` reserved now."""
        with self._lock:
            return self._total(kind)

    def reservations(self) -> tuple[Reservation, ...]:
        """Return what is held now, oldest first."""
        with self._lock:
            return tuple(self._held)

    @contextmanager
    def reserve(self, name: str, *, device: int = 0, host: int = 0, pinned: int = 0) -> Iterator[Reservation]:
        """Hold bytes while the context lasts, however it ends.

        Args:
            name: What the bytes are for; shown in refusals.
            device: Bytes on the device.
            host: Bytes of pageable host memory.
            pinned: Bytes of page-locked host memory.

        Raises:
            BudgetError: Some kind would pass its limit; nothing is held then.
            RequestError: A size is negative.
        """
        wanted = Reservation(name, device, host, pinned)
        self._take(wanted)
        try:
            yield wanted
        finally:
            with self._lock:
                self._held.remove(wanted)

    def _take(self, wanted: Reservation) -> None:
        if min(wanted.device, wanted.host, wanted.pinned) < 0:
            raise RequestError(f"cannot reserve a negative size for {wanted.name}", have=repr(wanted))
        with self._lock:
            for kind in MemoryKind:
                self._check(wanted, kind)
            self._held.append(wanted)
            for kind in MemoryKind:
                self._peak[kind] = max(self._peak[kind], self._total(kind))

    def _check(self, wanted: Reservation, kind: MemoryKind) -> None:
        limit: int | None = getattr(self.budget, f"{kind.value}_bytes")
        held = self._total(kind)
        if limit is None or wanted.of(kind) == 0 or held + wanted.of(kind) <= limit:
            return
        names = ", ".join(f"{r.name} {format_bytes(r.of(kind))}" for r in self._held if r.of(kind))
        raise BudgetError(
            f"{wanted.name} does not fit the {kind.value} memory budget",
            need=format_bytes(wanted.of(kind)),
            have=f"{format_bytes(limit - held)} free of {format_bytes(limit)}",
            remedy=f"Raise {kind.value}_bytes to {format_bytes(held + wanted.of(kind))} "
            f"or free what is held: {names or 'nothing'}.",
        )

    def _total(self, kind: MemoryKind) -> int:
        return sum(reservation.of(kind) for reservation in self._held)
