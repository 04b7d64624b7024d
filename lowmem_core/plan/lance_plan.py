"""How an image of Lance spends device memory, leg by leg: reading the prompt, drawing, decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import BudgetError, RequestError
from ..units import format_bytes
from .decode_plan import DecodePlan
from .stream_plan import SLOTS, StreamPlan, WeightInventory, plan_stream

PARALLEL = "parallel"
RELAY = "relay"
MEMORY_MODES = (PARALLEL, RELAY)


@dataclass(frozen=True)
class LanceSizes:
    """What a plan is made of.

    Attributes:
        und: Weights of the tower that understands.
        drawing: Weights of both towers, and of what turns latents into hidden states.
        gen_blocks: Which blocks of ``drawing`` belong to the tower that draws.
        reading_bytes: Beside the weights while the prompt is read.
        predicting_bytes: Beside the weights while velocities are predicted.
        vae_bytes: Weights of the VAE's decoder.
    """

    und: WeightInventory
    drawing: WeightInventory
    gen_blocks: tuple[int, ...]
    reading_bytes: int
    predicting_bytes: int
    vae_bytes: int


@dataclass(frozen=True)
class LancePlan:
    """What will be on the device.

    Attributes:
        memory_mode: ``parallel`` or ``relay``.
        reading: Placement while the prompt is read; None where everything is there already.
        drawing: Placement while the image is drawn.
        decode: Of the VAE.
        sizes: What the plan was made of.
        limit_bytes: The device limit, or None.
    """

    memory_mode: str
    reading: StreamPlan | None
    drawing: StreamPlan
    decode: DecodePlan
    sizes: LanceSizes
    limit_bytes: int | None

    @property
    def prefill_bytes(self) -> int:
        """Planned peak while the prompt is read."""
        weights = self._all_weights if self.reading is None else self.reading.device_bytes
        return weights + self.sizes.reading_bytes

    @property
    def denoise_bytes(self) -> int:
        """Planned peak while the image is drawn."""
        weights = self._all_weights if self.reading is None else self.drawing.device_bytes
        return weights + self.sizes.predicting_bytes

    @property
    def decode_bytes(self) -> int:
        """Planned peak while the image is decoded."""
        beside = self.drawing.device_bytes if self.reading is None else 0
        return beside + self.decode.planned_peak_bytes

    @property
    def planned_peak_bytes(self) -> int:
        """The largest of them."""
        return max(self.prefill_bytes, self.denoise_bytes, self.decode_bytes)

    @property
    def _all_weights(self) -> int:
        return self.drawing.device_bytes + self.sizes.vae_bytes

    def __str__(self) -> str:
        legs = (("prefill", self.prefill_bytes), ("denoise", self.denoise_bytes), ("decode", self.decode_bytes))
        peaks = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in legs)
        return f"{self.memory_mode}: {self.drawing}; peaks: {peaks}"


def check_mode(memory_mode: str, task: str, use_kvcache: bool) -> None:
    """Raise RequestError unless a memory mode is known and can do what is asked."""
    if memory_mode not in MEMORY_MODES:
        raise RequestError("there is no such memory mode", need=" or ".join(MEMORY_MODES), have=repr(memory_mode))
    if task != "t2i":
        raise RequestError(
            f"memory mode {memory_mode!r} makes images from text only",
            need="task t2i: other tasks read images or make videos, for which it has no vision tower and no plan",
            have=f"task {task}",
            remedy="Use task t2i.",
        )
    if not use_kvcache:
        raise RequestError(
            f"memory mode {memory_mode!r} needs the key and value cache",
            need="use_kvcache: without it every step reads the prompt again, so no tower could ever leave",
            have="use_kvcache off",
            remedy="Turn use_kvcache on.",
        )


def plan_lance(sizes: LanceSizes, decode: DecodePlan, memory_mode: str, limit_bytes: int | None = None) -> LancePlan:
    """Plan an image in the mode that was asked for; a mode is never changed.

    Relay without a limit keeps the tower that draws on the device and streams the other beside it. With
    ``limit_bytes`` it keeps as much as fits, the tower that draws first.

    Args:
        sizes: Bytes of weights and activations.
        decode: The canonical decode; it must fit by itself in relay mode.
        memory_mode: ``parallel`` or ``relay``.
        limit_bytes: The most device bytes at any time.

    Raises:
        BudgetError: The mode does not fit.
    """
    if memory_mode == PARALLEL:
        return _parallel(sizes, decode, limit_bytes)
    smallest = smallest_relay_bytes(sizes, decode)
    if limit_bytes is not None and limit_bytes < smallest:
        raise BudgetError(
            "the image does not fit the budget, even by relay",
            need=f"{format_bytes(smallest)} ({smallest} bytes)",
            have=format_bytes(limit_bytes),
            remedy="Raise the budget to what is needed, or make a smaller image.",
            smallest_bytes=smallest,
        )
    reading = plan_stream(sizes.und, min(sizes.und.smallest_bytes, sizes.und.total_bytes))
    room = relay_weight_bytes(sizes) if limit_bytes is None else limit_bytes - sizes.predicting_bytes
    return LancePlan(
        RELAY, reading, plan_stream(sizes.drawing, room, first=sizes.gen_blocks), decode, sizes, limit_bytes
    )


def relay_weight_bytes(sizes: LanceSizes) -> int:
    """Return the weight bytes of a relay without a limit: the tower that draws, and slots for the other."""
    gen = set(sizes.gen_blocks)
    blocks = sizes.drawing.block_bytes
    others = [nbytes for index, nbytes in enumerate(blocks) if index not in gen]
    kept = sum(nbytes for index, nbytes in enumerate(blocks) if index in gen)
    return min(sizes.drawing.total_bytes, sizes.drawing.root_bytes + kept + SLOTS * max(others, default=0))


def smallest_relay_bytes(sizes: LanceSizes, decode: DecodePlan) -> int:
    """Return the smallest budget that a relay can keep."""
    return max(
        sizes.und.smallest_bytes + sizes.reading_bytes,
        sizes.drawing.smallest_bytes + sizes.predicting_bytes,
        decode.planned_peak_bytes,
    )


def _parallel(sizes: LanceSizes, decode: DecodePlan, limit_bytes: int | None) -> LancePlan:
    plan = LancePlan(PARALLEL, None, plan_stream(sizes.drawing), decode, sizes, limit_bytes)
    if limit_bytes is None or plan.planned_peak_bytes <= limit_bytes:
        return plan
    smallest = smallest_relay_bytes(sizes, decode)
    advice = f'Use memory mode "{RELAY}", which needs {format_bytes(smallest)} here'
    advice += " and gives the same pixels." if smallest <= limit_bytes else ", and a smaller image."
    raise BudgetError(
        "both towers and the VAE do not fit on the device together",
        need=f"{format_bytes(plan.planned_peak_bytes)}",
        have=format_bytes(limit_bytes),
        remedy=advice,
        smallest_bytes=plan.planned_peak_bytes,
    )


def gen_blocks_of(blocks: Sequence[object], gen: Sequence[object]) -> tuple[int, ...]:
    """Return the indices of ``blocks`` that are among ``gen``, by identity."""
    known = {id(block) for block in gen}
    return tuple(index for index, block in enumerate(blocks) if id(block) in known)
