"""How a denoise run spends device memory: weights in one of two modes, activations of one pass or of two in step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import BudgetError, RequestError
from ..units import GiB, format_bytes
from .stream_plan import StreamPlan, WeightInventory, plan_stream

RESIDENT = "resident"
STREAM = "stream"
MEMORY_MODES = (RESIDENT, STREAM)
DEFAULT_WEIGHT_BYTES = 2 * GiB


@dataclass(frozen=True)
class Activations:
    """Device bytes beside the weights.

    Attributes:
        one_pass: While one pass of the model runs.
        two_passes: While both guidance passes run in step, or None where guidance is off.
    """

    one_pass: int
    two_passes: int | None = None


@dataclass(frozen=True)
class DenoisePlan:
    """What will be on the device during a denoise.

    Attributes:
        memory_mode: ``resident`` or ``stream``.
        streams: Placement of each transformer, in the order they run.
        shares_blocks: Whether both guidance passes use a block while it is there.
        activation_bytes: Bytes beside the weights.
        limit_bytes: The device limit the plan was made for, or None.
    """

    memory_mode: str
    streams: tuple[StreamPlan, ...]
    shares_blocks: bool
    activation_bytes: int
    limit_bytes: int | None

    @property
    def weight_bytes(self) -> int:
        """The most weight bytes on the device at once: slots are shared, resident weights take turns."""
        slots = max(plan.slots for plan in self.streams) * max(plan.slot_bytes for plan in self.streams)
        return slots + max(plan.base_bytes for plan in self.streams)

    @property
    def planned_peak_bytes(self) -> int:
        """Weights and activations together."""
        return self.weight_bytes + self.activation_bytes

    def __str__(self) -> str:
        passes = ", both guidance passes share each block" if self.shares_blocks else ""
        return (
            f"{self.memory_mode}: {self.streams[0]}{passes}; activations {format_bytes(self.activation_bytes)}, "
            f"peak {format_bytes(self.planned_peak_bytes)}"
        )


def plan_denoise(
    inventories: Sequence[WeightInventory],
    activations: Activations,
    memory_mode: str = RESIDENT,
    limit_bytes: int | None = None,
    weight_limit_bytes: int | None = None,
) -> DenoisePlan:
    """Plan a denoise in the mode that was asked for; a mode is never changed.

    Streaming without limits keeps 2 GiB of weights on the device, or the least that works if that is more. With
    ``limit_bytes`` it keeps as many blocks resident as fit beside the activations.

    Args:
        inventories: The weights of each transformer.
        activations: Bytes beside them.
        memory_mode: ``resident`` or ``stream``.
        limit_bytes: The most device bytes for everything.
        weight_limit_bytes: The most device bytes for weights, slots included.

    Raises:
        RequestError: The mode is unknown.
        BudgetError: The mode does not fit.
    """
    if memory_mode not in MEMORY_MODES:
        raise RequestError("there is no such memory mode", need=" or ".join(MEMORY_MODES), have=repr(memory_mode))
    if memory_mode == RESIDENT:
        return _resident(inventories, activations, limit_bytes)
    return _streamed(inventories, activations, limit_bytes, weight_limit_bytes)


def _resident(inventories: Sequence[WeightInventory], activations: Activations, limit_bytes: int | None) -> DenoisePlan:
    streams = tuple(plan_stream(inventory) for inventory in inventories)
    plan = DenoisePlan(RESIDENT, streams, False, activations.one_pass, limit_bytes)
    if limit_bytes is None or plan.planned_peak_bytes <= limit_bytes:
        return plan
    smallest = _smallest(inventories, activations)
    advice = f'Use memory mode "{STREAM}", which needs {format_bytes(smallest)} here'
    advice += ", or fewer frames or pixels." if smallest <= limit_bytes else ", and fewer frames or pixels."
    raise BudgetError(
        "the model does not fit on the device as a whole",
        need=f"{format_bytes(plan.planned_peak_bytes)} ({format_bytes(plan.weight_bytes)} of weights)",
        have=format_bytes(limit_bytes),
        remedy=advice,
        smallest_bytes=plan.planned_peak_bytes,
    )


def _streamed(
    inventories: Sequence[WeightInventory],
    activations: Activations,
    limit_bytes: int | None,
    weight_limit_bytes: int | None,
) -> DenoisePlan:
    """Share blocks between the passes if that fits, else run one pass at a time."""
    smallest_weights = max(inventory.smallest_bytes for inventory in inventories)
    for shares, nbytes in ((True, activations.two_passes), (False, activations.one_pass)):
        if nbytes is None:
            continue
        room = weight_limit_bytes
        if limit_bytes is not None:
            room = min(limit_bytes - nbytes, weight_limit_bytes or limit_bytes)
        if room is None:
            room = max(DEFAULT_WEIGHT_BYTES, smallest_weights)
        if room >= smallest_weights or (limit_bytes is None and not shares):
            streams = tuple(plan_stream(inventory, room) for inventory in inventories)
            return DenoisePlan(STREAM, streams, shares, nbytes, limit_bytes)
    smallest = smallest_weights + activations.one_pass
    raise BudgetError(
        "the run does not fit the budget, even streamed",
        need=f"{format_bytes(smallest)} ({smallest} bytes): {format_bytes(smallest_weights)} of weights and slots, "
        f"{format_bytes(activations.one_pass)} of activations",
        have=format_bytes(limit_bytes or weight_limit_bytes or 0),
        remedy="Raise the budget to what is needed, or use fewer frames, a smaller size or a quantised file.",
        smallest_bytes=smallest,
    )


def _smallest(inventories: Sequence[WeightInventory], activations: Activations) -> int:
    return max(inventory.smallest_bytes for inventory in inventories) + activations.one_pass
