"""Blocks of a module on the device only while they run, the next one arriving meanwhile.

The ordering problem, in both directions: a block may compute only when its weights have arrived, and a slot may be
refilled only when the block that was in it has computed. ``CopySync`` knows how on each device; this file decides
what goes where.

A forward hook on each block asks for its weights. The block that ran before gives up its slot then, not earlier, so
calling one block several times in a row (both guidance passes) copies it once. Then the blocks that follow are begun:
the next in order, after the last one the first, of this module or of the one that was announced as next.

Parameters are never rebound. Their ``data`` points at a slot, or at a NaN placeholder, and at the end at the very
same host tensor as before, so a module that another thread builds meanwhile is not touched.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import RequestError
from ..load.placeholder import placeholder
from ..memory import is_simulated
from ..plan.stream_plan import StreamPlan
from ..weights import TensorLocation
from .copy_sync import BlockReader, CopySync, DirectCopies, StreamCopies, write_unit
from .layout import Unit, set_data, units_of
from .slots import Slot, SlotPool, device_bytes
from .sources import DiskSource, HostSource, PinnedSource, WeightSource

_log = logging.getLogger(__name__)
_MARK = "_lowmem_streamer"


@dataclass(frozen=True)
class StreamedModule:
    """A module to stream.

    Attributes:
        module: The module; its weights are in host memory or, with ``locations``, on disk.
        blocks: Its repeated layers, in running order.
        plan: Where each block lives.
        locations: Where the bytes of each tensor are on disk, for a module loaded without them.
        invalidate: Called if the module cannot be put back as it was; it must not be used again then.
    """

    module: nn.Module
    blocks: Sequence[nn.Module]
    plan: StreamPlan
    locations: Mapping[str, TensorLocation] | None = None
    invalidate: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class StreamOptions:
    """How to stream.

    Attributes:
        pinned: Pack host weights in pinned memory where the device can use that.
        mark_host: Context in which allocations count as host memory.
        poison: Fill released slots with NaN; for tests.
    """

    pinned: bool = True
    mark_host: Callable[[], AbstractContextManager[None]] = nullcontext
    poison: bool = False


@dataclass
class StreamStatistics:
    """What a streamer did.

    Attributes:
        streamed_bytes: Bytes copied into slots.
        base_bytes: Bytes copied into the resident allocation.
        copies: Blocks copied into slots.
        misses: Blocks that were not begun before they were needed.
        wait_s: Seconds the calling thread waited for blocks.
    """

    streamed_bytes: int = 0
    base_bytes: int = 0
    copies: int = 0
    misses: int = 0
    wait_s: float = 0.0


class _Key(NamedTuple):
    """A block of one of the modules."""

    member: int
    block: int


@dataclass
class _Member:
    """A module, cut into units, with what its tensors held before."""

    spec: StreamedModule
    root: Unit
    units: tuple[Unit, ...]
    source: WeightSource
    originals: list[tuple[Tensor, Tensor, torch.device]]
    next_member: int
    bases: dict[int, int] = field(default_factory=dict)

    @property
    def resident(self) -> list[Unit]:
        """The units of the resident allocation."""
        return [self.root, *(self.units[index] for index in self.spec.plan.resident)]


class WeightStreamer:
    """Streams one or several modules that run in turn, as a context manager.

    Only one module's resident weights are on the device at a time; all share the slots. Calling a module, or
    ``activate``, brings its resident weights in.

    Args:
        modules: The modules.
        device: Where they compute.
        options: How.

    Raises:
        RequestError: A module is already being streamed.
    """

    def __init__(
        self, modules: Sequence[StreamedModule], device: torch.device, options: StreamOptions | None = None
    ) -> None:
        self.device = device
        self.statistics = StreamStatistics()
        self._specs = tuple(modules)
        self._options = options or StreamOptions()
        self._members: list[_Member] = []
        self._handles: list[Any] = []
        self._active: int | None = None
        self._current: _Key | None = None
        self._base: Tensor | None = None
        self._pool: SlotPool | None = None
        self._copies: CopySync = DirectCopies()

    @property
    def is_synchronous(self) -> bool:
        """Whether copies are made while the computation waits."""
        return self._copies.is_synchronous

    @property
    def device_bytes(self) -> int:
        """Weight bytes on the device: slots, roots and resident blocks."""
        plans = [spec.plan for spec in self._specs]
        slots = max(plan.slots for plan in plans) * max(plan.slot_bytes for plan in plans)
        return slots + max(plan.base_bytes for plan in plans)

    def __enter__(self) -> WeightStreamer:
        _claim(self._specs, self)
        try:
            for index, spec in enumerate(self._specs):
                self._members.append(self._take(index, spec))
            self._allocate()
            for index, spec in enumerate(self._specs):
                self._hook(index, spec)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def activate(self, module: nn.Module) -> None:
        """Bring the root and the resident blocks of ``module`` onto the device, in place of another module's."""
        self._activate(self._index(module))

    def announce(self, module: nn.Module, following: nn.Module) -> None:
        """Say that after the last block of ``module`` the first block of ``following`` will be needed."""
        self._members[self._index(module)].next_member = self._index(following)

    def _index(self, module: nn.Module) -> int:
        return next(index for index, spec in enumerate(self._specs) if spec.module is module)

    def _take(self, index: int, spec: StreamedModule) -> _Member:
        """Cut a module into units and empty its tensors, after bringing what is on the device to the host."""
        root, units = units_of(spec.module, spec.blocks)
        entries = [entry for unit in (root, *units) for entry in unit.entries]
        originals, hosted = [], {}
        for entry in entries:
            held, home = entry.tensor.data, entry.tensor.device
            if home.type != "cpu" and home.type == self.device.type:
                held = held.to("cpu")
            hosted[id(entry.tensor)] = held
            originals.append((entry.tensor, held, home))
            set_data(entry.tensor, placeholder(entry.shape, entry.dtype, self.device))
        return _Member(spec, root, units, self._source(spec, hosted), originals, index)

    def _source(self, spec: StreamedModule, hosted: dict[int, Tensor]) -> WeightSource:
        if spec.locations:
            return DiskSource(spec.locations, hosted, self._options.mark_host)
        if self._options.pinned and self._has_streams(next(iter(hosted.values()))):
            return PinnedSource(hosted, self._options.mark_host)
        return HostSource(hosted)

    def _has_streams(self, sample: Tensor) -> bool:
        return self.device.type == "cuda" and not is_simulated(sample)

    def _allocate(self) -> None:
        """Make the resident allocation and the slots; all device memory of the streamer."""
        plans = [spec.plan for spec in self._specs]
        self._base = device_bytes(max(plan.base_bytes for plan in plans), self.device)
        slot_bytes = max(plan.slot_bytes for plan in plans)
        self._pool = SlotPool(max(plan.slots for plan in plans), slot_bytes, self.device, self._options.poison)
        if self._has_streams(self._base):
            self._copies = StreamCopies(self.device, self._pool, slot_bytes, self._options.mark_host)
        elif any(spec.locations for spec in self._specs) and not is_simulated(self._base):
            self._copies = BlockReader()

    def _hook(self, index: int, spec: StreamedModule) -> None:
        def before_module(*_: object) -> None:
            self._activate(index)

        self._handles.append(spec.module.register_forward_pre_hook(before_module))
        for number, block in enumerate(spec.blocks):
            self._handles.append(block.register_forward_pre_hook(partial(self._before_block, _Key(index, number))))

    def _before_block(self, key: _Key, *_: object) -> None:
        self._need(key)

    def _activate(self, index: int) -> None:
        if self._active == index or self._base is None:
            return
        self._release_current()
        if self._active is not None:
            self._empty_base(self._members[self._active])
        member, base = self._members[index], 0
        self._active = None
        for unit in member.resident:
            write_unit(member.source, unit, self._base, base)
            _point(unit, self._base, base)
            base += unit.nbytes
        self._active = index
        self.statistics.base_bytes += base

    def _empty_base(self, member: _Member) -> None:
        for unit in member.resident:
            self._empty(unit)

    def _empty(self, unit: Unit) -> None:
        for entry in unit.entries:
            set_data(entry.tensor, placeholder(entry.shape, entry.dtype, self.device))

    def _need(self, key: _Key) -> None:
        """Make the weights of a block readable and begin what follows."""
        if self._current == key:
            return
        self._activate(key.member)
        self._release_current()
        if key.block in self._members[key.member].spec.plan.streamed:
            self._bring(key)
        self._begin_following(key)

    def _bring(self, key: _Key) -> None:
        assert self._pool is not None
        slot = self._pool.holding(key)
        if slot is None:
            self.statistics.misses += 1
            slot = self._begin(key, keep=[])
        started = time.perf_counter()
        try:
            self._copies.finish(slot)
        except BaseException:
            self._pool.vacate(slot)
            raise
        self.statistics.wait_s += time.perf_counter() - started
        _point(self._unit(key), slot.slab, 0)
        self._current = key

    def _begin(self, key: _Key, keep: list[_Key]) -> Slot:
        assert self._pool is not None
        slot = self._pool.idle(keep)
        assert slot is not None
        if slot.holds is not None:
            self._copies.release(slot)
            self._pool.vacate(slot)
        unit, source = self._unit(key), self._members[key.member].source
        self._copies.start(slot, unit, source)
        slot.holds = key
        self.statistics.copies += 1
        self.statistics.streamed_bytes += unit.nbytes
        return slot

    def _begin_following(self, key: _Key) -> None:
        """Begin as many of the following blocks as there are slots for."""
        assert self._pool is not None
        if self._copies.is_synchronous:
            return
        room = len(self._pool.slots) - (self._current is not None)
        wanted = list(islice(self._following(key), room))
        keep = [*wanted, *([self._current] if self._current else [])]
        for following in wanted:
            if self._pool.holding(following) is None:
                self._begin(following, keep)

    def _following(self, key: _Key) -> Iterator[_Key]:
        """Yield the streamed blocks that come after ``key``, each once."""
        member = self._members[key.member]
        yield from (_Key(key.member, block) for block in member.spec.plan.streamed if block > key.block)
        after = member.next_member
        stop = key.block if after == key.member else len(self._members[after].units)
        yield from (_Key(after, block) for block in self._members[after].spec.plan.streamed if block < stop)

    def _unit(self, key: _Key) -> Unit:
        return self._members[key.member].units[key.block]

    def _release_current(self) -> None:
        if self._current is None or self._pool is None:
            return
        slot = self._pool.holding(self._current)
        self._empty(self._unit(self._current))
        self._current = None
        if slot is not None:
            self._copies.release(slot)
            self._pool.vacate(slot)

    def _leave(self) -> None:
        """Put everything back, whatever state it is in."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._copies.close()
        self._active, self._current, self._base = None, None, None
        if self._pool is not None:
            self._pool.clear()
        for member in self._members:
            _restore(member)
        self._members.clear()
        _disown(self._specs, self)


@contextmanager
def streamed(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    plan: StreamPlan,
    device: torch.device,
    options: StreamOptions | None = None,
) -> Iterator[WeightStreamer]:
    """Stream the ``blocks`` of one ``module`` on ``device`` while the context lasts.

    Raises:
        RequestError: The module is already being streamed.
    """
    with WeightStreamer([StreamedModule(module, blocks, plan)], device, options) as streamer:
        yield streamer


def _point(unit: Unit, slab: Tensor, base: int) -> None:
    for entry in unit.entries:
        set_data(entry.tensor, entry.view(slab, base))


def _restore(member: _Member) -> None:
    """Give every tensor what it held; if that fails, say that the module is lost and go on with the rest."""
    lost: BaseException | None = None
    for tensor, held, home in reversed(member.originals):
        try:
            set_data(tensor, held if held.device == home else held.to(home))
        except Exception as error:
            set_data(tensor, held)
            lost = error
    member.source.close()
    if lost is not None:
        _log.error("a streamed module could not be put back on its device (%s); it will be loaded again", lost)
        member.spec.invalidate()


def _claim(specs: Sequence[StreamedModule], owner: WeightStreamer) -> None:
    for spec in specs:
        if _MARK in spec.module.__dict__:
            _disown(specs, owner)
            raise RequestError(
                "the module is already being streamed",
                need="one placement at a time",
                remedy="Load the model a second time, or wait until the other run is over.",
            )
        spec.module.__dict__[_MARK] = owner


def _disown(specs: Sequence[StreamedModule], owner: WeightStreamer) -> None:
    for spec in specs:
        if spec.module.__dict__.get(_MARK) is owner:
            del spec.module.__dict__[_MARK]
