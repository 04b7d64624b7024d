"""How a block's bytes get into a slot, and how computation and copy wait for each other.

Two orders must hold. A slot may be read only after its copy has arrived (``finish``), and may be overwritten only
after the computation that was given it has run (``release``). On CUDA both are events between the compute stream and
one copy stream; nothing ever waits for the whole device. Elsewhere copies are made at once, on the calling thread or,
for weights on disk, on a reader thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from .layout import Unit
from .slots import Slot, SlotPool
from .sources import WeightSource


class CopySync(Protocol):
    """Copies units into slots."""

    is_synchronous: bool

    def start(self, slot: Slot, unit: Unit, source: WeightSource) -> None:
        """Begin to copy ``unit`` into ``slot``."""

    def finish(self, slot: Slot) -> None:
        """Let the computation that follows on this thread read ``slot``; raise what the copy raised."""

    def release(self, slot: Slot) -> None:
        """Note that the computation enqueued so far is the last to read ``slot``."""

    def close(self) -> None:
        """Let nothing be under way any more."""


class DirectCopies:
    """Copies on the calling thread, when the block is needed."""

    is_synchronous = True

    def start(self, slot: Slot, unit: Unit, source: WeightSource) -> None:
        """Remember what to copy: doing it ahead would gain nothing."""
        slot.pending = (unit, source)

    def finish(self, slot: Slot) -> None:
        """Copy."""
        if slot.pending is not None:
            unit, source = slot.pending
            write_unit(source, unit, slot.slab)
            slot.pending = None

    def release(self, slot: Slot) -> None:
        """Do nothing: computation is over when it returns."""
        slot.pending = None

    def close(self) -> None:
        """Do nothing."""


class BlockReader:
    """One thread that fills slots ahead, in the order they were asked for."""

    is_synchronous = False

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lowmem-block-reader")

    def start(self, slot: Slot, unit: Unit, source: WeightSource) -> None:
        """Hand the work to the thread."""
        slot.pending = self._thread.submit(self._fill, slot, unit, source)

    def finish(self, slot: Slot) -> None:
        """Wait for the thread."""
        pending: Future[None] | None = slot.pending
        slot.pending = None
        if pending is not None:
            pending.result()

    def release(self, slot: Slot) -> None:
        """Let an unneeded copy end; what it raised no longer matters, the next read will raise it again."""
        pending: Future[None] | None = slot.pending
        slot.pending = None
        if pending is not None and not pending.cancel():
            pending.exception()

    def close(self) -> None:
        """Drop what waits and let the thread end."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _fill(self, slot: Slot, unit: Unit, source: WeightSource) -> None:
        with torch.inference_mode():
            write_unit(source, unit, slot.slab)


class StreamCopies(BlockReader):
    """Asynchronous copies on a CUDA stream of their own.

    Units that are packed in pinned memory are copied from there. Others are first gathered in one of two pinned
    staging slabs by the reader thread, which waits until the earlier copy out of it is done.

    Args:
        device: A CUDA device.
        pool: The slots; each gets its events.
        stage_bytes: Bytes of a staging slab; none is made while every unit comes packed.
        mark_host: Context in which allocations count as host memory.
    """

    def __init__(
        self,
        device: torch.device,
        pool: SlotPool,
        stage_bytes: int,
        mark_host: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__()
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._mark_host = mark_host
        self._stages: list[tuple[Tensor, torch.cuda.Event]] = []
        self._stage_bytes = stage_bytes
        self._turn = 0
        for slot in pool.slots:
            slot.free, slot.ready = _event(), _event()
            slot.free.record(torch.cuda.current_stream(device))

    def finish(self, slot: Slot) -> None:
        """Make the current stream wait until the copy has arrived."""
        super().finish(slot)
        torch.cuda.current_stream(self._device).wait_event(slot.ready)

    def release(self, slot: Slot) -> None:
        """Record how far the current stream must get before the slot is overwritten."""
        super().release(slot)
        slot.free.record(torch.cuda.current_stream(self._device))

    def close(self) -> None:
        """End the thread; later users of the slots' memory on this stream come after the last copy."""
        super().close()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._stream.synchronize()
        self._stages.clear()

    def _make_stages(self) -> None:
        if self._stages:
            return
        with self._mark_host(), torch.inference_mode(False):
            for _ in range(2):
                try:
                    stage = torch.empty(self._stage_bytes, dtype=torch.uint8, pin_memory=True)
                except RuntimeError:
                    stage = torch.empty(self._stage_bytes, dtype=torch.uint8)
                self._stages.append((stage, _event()))

    def _fill(self, slot: Slot, unit: Unit, source: WeightSource) -> None:
        """Copy on the copy stream; runs on the reader thread."""
        packed = source.packed(unit)
        with torch.inference_mode(), torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            staged = None
            if packed is None:
                self._make_stages()
                staged = self._stages[self._turn % len(self._stages)]
                self._turn += 1
                staged[1].synchronize()
                write_unit(source, unit, staged[0])
                packed = staged[0]
            self._stream.wait_event(slot.free)
            slot.slab[: unit.nbytes].copy_(packed[: unit.nbytes], non_blocking=True)
            slot.ready.record(self._stream)
            if staged is not None:
                staged[1].record(self._stream)


def write_unit(source: WeightSource, unit: Unit, slab: Tensor, base: int = 0) -> None:
    """Copy every tensor of ``unit`` into ``slab``, where it begins at ``base``."""
    for entry in unit.entries:
        source.write_entry(entry, entry.view(slab, base))


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return event
