"""Which blocks stay on the device and which are streamed through slots, decided in bytes before anything is copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import BudgetError
from ..units import format_bytes

SLOTS = 2


@dataclass(frozen=True)
class WeightInventory:
    """Bytes of a module's weights as they would lie on the device.

    Attributes:
        root_bytes: Everything outside the blocks.
        block_bytes: Each block, in running order.
    """

    root_bytes: int
    block_bytes: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.root_bytes + sum(self.block_bytes)

    @property
    def smallest_bytes(self) -> int:
        """The least that streaming needs: the root and ``SLOTS`` slots, or everything if that is less."""
        return min(self.total_bytes, self.root_bytes + SLOTS * max(self.block_bytes, default=0))


@dataclass(frozen=True)
class StreamPlan:
    """Where the weights of one module live while it runs.

    Attributes:
        resident: Indices of blocks that stay on the device.
        streamed: Indices of blocks that are copied to a slot each time they run, in running order.
        slots: Slots to stream through; 0 when nothing is streamed.
        slot_bytes: Bytes of one slot.
        base_bytes: Bytes of the root and of the resident blocks.
        streamed_bytes: Bytes that cross the bus each time all blocks run once.
        limit_bytes: The limit the plan was made for, or None.
    """

    resident: tuple[int, ...]
    streamed: tuple[int, ...]
    slots: int
    slot_bytes: int
    base_bytes: int
    streamed_bytes: int
    limit_bytes: int | None = None

    @property
    def device_bytes(self) -> int:
        """The most weight bytes on the device at once, slots included."""
        return self.base_bytes + self.slots * self.slot_bytes

    def __str__(self) -> str:
        blocks = len(self.resident) + len(self.streamed)
        if not self.streamed:
            return f"all {blocks} blocks resident, {format_bytes(self.device_bytes)} of weights on the device"
        return (
            f"{len(self.resident)} of {blocks} blocks resident, {len(self.streamed)} streamed through {self.slots} "
            f"slots, {format_bytes(self.device_bytes)} of weights on the device, "
            f"{format_bytes(self.streamed_bytes)} over the bus each pass"
        )


def plan_stream(
    inventory: WeightInventory,
    limit_bytes: int | None = None,
    slots: int = SLOTS,
    first: Sequence[int] = (),
) -> StreamPlan:
    """Keep as many blocks resident as ``limit_bytes`` allows and stream the others.

    Resident blocks are spread evenly among the streamed ones, so that a copy always has computation to hide behind.

    Args:
        inventory: The module's bytes.
        limit_bytes: The most weight bytes on the device, slots and root included; None keeps everything resident.
        slots: Slots to stream through.
        first: Blocks to keep before any other is kept.

    Raises:
        BudgetError: Not even the root and the slots fit.
    """
    if limit_bytes is None or inventory.total_bytes <= limit_bytes:
        return _plan(inventory, tuple(range(len(inventory.block_bytes))), 0, limit_bytes)
    others = [index for index in range(len(inventory.block_bytes)) if index not in set(first)]
    for count in range(len(inventory.block_bytes) - 1, -1, -1):
        kept = [*_spread(min(count, len(first)), first), *_spread(max(0, count - len(first)), others)]
        plan = _plan(inventory, tuple(sorted(kept)), slots, limit_bytes)
        if plan.device_bytes <= limit_bytes:
            return plan
    smallest = inventory.root_bytes + slots * max(inventory.block_bytes, default=0)
    raise BudgetError(
        "the weight budget is too small to stream through",
        need=f"{format_bytes(smallest)} ({smallest} bytes): {format_bytes(inventory.root_bytes)} outside the blocks "
        f"and {slots} slots",
        have=format_bytes(limit_bytes),
        remedy="Raise the budget to what is needed, or use a quantised file of the model.",
        smallest_bytes=smallest,
    )


def _plan(inventory: WeightInventory, resident: tuple[int, ...], slots: int, limit_bytes: int | None) -> StreamPlan:
    sizes = inventory.block_bytes
    streamed = tuple(index for index in range(len(sizes)) if index not in set(resident))
    return StreamPlan(
        resident=resident,
        streamed=streamed,
        slots=min(slots, len(streamed)),
        slot_bytes=max((sizes[index] for index in streamed), default=0),
        base_bytes=inventory.root_bytes + sum(sizes[index] for index in resident),
        streamed_bytes=sum(sizes[index] for index in streamed),
        limit_bytes=limit_bytes,
    )


def _spread(count: int, indices: Sequence[int]) -> list[int]:
    """Return ``count`` of ``indices``, evenly spaced."""
    total = len(indices)
    return [one for place, one in enumerate(indices) if (place + 1) * count // total > place * count // total]
