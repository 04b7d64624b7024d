"""Live bytes of tensor storages: who is alive, on which side, and how much it was at most.

A storage is known by identity while it lives and leaves by a weak reference, so Python's own reference counts say how
long it lives. An identity may be given to a new storage as soon as the old one is gone; an entry therefore counts only
while its weak reference still points at the very object that asks.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from .allocator import Block, CachingAllocator

if TYPE_CHECKING:
    import torch


class Side(Enum):
    """Who a storage is charged to."""

    DEVICE = "device"
    HOST = "host"
    EXTERNAL = "external"
    """Known, so that its views are recognised, but not charged to anyone."""


@dataclass
class _Entry:
    """One living storage."""

    ref: weakref.ref[torch.UntypedStorage]
    side: Side
    raw_bytes: int
    charged_bytes: int
    block: Block | None


class LiveStorages:
    """The set of living storages and their total per side, safe to use from several threads.

    Args:
        round_to: Device storages are charged in multiples of this many bytes.
        allocator: Also serves every device storage from this model of an allocator.
    """

    def __init__(self, round_to: int = 1, allocator: CachingAllocator | None = None) -> None:
        self._round_to = round_to
        self._allocator = allocator
        # Re-entrant: a collection inside the lock may run a death callback on the same thread.
        self._lock = threading.RLock()
        self._entries: dict[int, _Entry] = {}
        self._live = dict.fromkeys(Side, 0)
        self._peak = dict.fromkeys(Side, 0)

    def live(self, side: Side) -> int:
        """Return the bytes charged to ``side`` now."""
        with self._lock:
            return self._live[side]

    def peak(self, side: Side) -> int:
        """Return the most bytes charged to ``side`` at once since the last reset."""
        with self._lock:
            return self._peak[side]

    def reset_peak(self) -> None:
        """Start the peaks again from what is alive now."""
        with self._lock:
            self._peak = dict(self._live)

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def see(self, storage: torch.UntypedStorage, side: Side) -> None:
        """Charge ``storage`` to ``side`` unless it is known; charge a known one again only if it was resized."""
        with self._lock:
            entry = self._find(storage)
            if entry is None:
                self._enter(storage, side)
            elif entry.side is not Side.EXTERNAL and entry.raw_bytes != storage.nbytes():
                self._leave(id(storage), entry)
                self._enter(storage, entry.side)

    def charge(self, storage: torch.UntypedStorage, side: Side) -> None:
        """Charge ``storage`` to ``side`` even if it was known as somebody else's."""
        with self._lock:
            entry = self._find(storage)
            if entry is not None and entry.side is Side.EXTERNAL:
                self._leave(id(storage), entry)
            self.see(storage, side)

    def _find(self, storage: torch.UntypedStorage) -> _Entry | None:
        entry = self._entries.get(id(storage))
        return entry if entry is not None and entry.ref() is storage else None

    def _enter(self, storage: torch.UntypedStorage, side: Side) -> None:
        key = id(storage)
        stale = self._entries.get(key)
        if stale is not None:  # died unseen: its callback has not run yet, and will find a newer entry
            self._leave(key, stale)
        raw = storage.nbytes()
        charged = 0 if side is Side.EXTERNAL else raw
        block = None
        if side is Side.DEVICE:
            charged = -(-raw // self._round_to) * self._round_to
            block = self._allocator.allocate(charged) if self._allocator is not None and charged else None

        def forget(ref: weakref.ref[torch.UntypedStorage]) -> None:
            with self._lock:
                entry = self._entries.get(key)
                if entry is not None and entry.ref is ref:
                    self._leave(key, entry)

        self._entries[key] = _Entry(weakref.ref(storage, forget), side, raw, charged, block)
        self._live[side] += charged
        self._peak[side] = max(self._peak[side], self._live[side])

    def _leave(self, key: int, entry: _Entry) -> None:
        del self._entries[key]
        self._live[entry.side] -= entry.charged_bytes
        if entry.block is not None and self._allocator is not None:
            self._allocator.free(entry.block)
