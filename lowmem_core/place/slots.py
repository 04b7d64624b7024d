"""Fixed staging space on the device. Slots are made once, so streaming never allocates and never fragments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

POISON = 0xFF  # as bytes this is NaN in fp32, fp16, bf16 and fp8


@dataclass(eq=False)
class Slot:
    """Room for one block.

    Attributes:
        slab: uint8 ``[bytes]`` on the device.
        holds: What was last copied in, as the streamer names it, or None.
        pending: What the copier still has to wait for.
        free: When the computation no longer reads the slot; the copier's own event.
        ready: When the copy has arrived; the copier's own event.
    """

    slab: Tensor
    holds: Any = None
    pending: Any = None
    free: Any = field(default=None, repr=False)
    ready: Any = field(default=None, repr=False)


class SlotPool:
    """All slots of a streamer.

    Args:
        count: How many.
        slot_bytes: Bytes of each.
        device: Where.
        poison: Fill a released slot with NaN, so that a stale read cannot go unseen.
    """

    def __init__(self, count: int, slot_bytes: int, device: torch.device, poison: bool = False) -> None:
        self.slots = [Slot(device_bytes(slot_bytes, device)) for _ in range(count)]
        self._poison = poison

    def holding(self, what: Any) -> Slot | None:
        """Return the slot that holds ``what``."""
        return next((slot for slot in self.slots if slot.holds == what), None)

    def idle(self, keep: list[Any]) -> Slot | None:
        """Return a slot that holds nothing, or else nothing of ``keep``."""
        unused = [slot for slot in self.slots if slot.holds is None]
        stale = [slot for slot in self.slots if slot.holds not in keep]
        return next(iter([*unused, *stale]), None)

    def vacate(self, slot: Slot) -> None:
        """Mark ``slot`` as holding nothing; it is the last to be used again."""
        slot.holds = None
        self.slots.remove(slot)
        self.slots.append(slot)
        if self._poison:
            slot.slab.fill_(POISON)

    def clear(self) -> None:
        """Free all slots."""
        self.slots.clear()


def device_bytes(nbytes: int, device: torch.device) -> Tensor:
    """Return uninitialised uint8 ``[nbytes]`` on ``device`` that any thread may write, also outside inference mode."""
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
