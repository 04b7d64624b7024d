"""A model of the CUDA caching allocator: turns allocations and frees into reserved bytes.

It follows the published behaviour for one stream in the default configuration: requests are rounded to 512 bytes,
served best fit from a small or a large pool, blocks are split and joined again, and the cached segments are returned
once before memory is declared exhausted. It has not been validated against a GPU.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..units import MiB, format_bytes

ROUNDING = 512
SMALL_REQUEST = 1 * MiB
SMALL_SEGMENT = 2 * MiB
LARGE_SEGMENT = 20 * MiB
OWN_SEGMENT_FROM = 10 * MiB
OWN_SEGMENT_ROUNDING = 2 * MiB


@dataclass(eq=False)
class Block:
    """A piece of a segment, linked to its neighbours in address order."""

    number: int
    segment: int
    offset: int
    size: int
    small: bool
    used: bool = False
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)


def segment_bytes(request: int) -> int:
    """Return the bytes asked of the driver when no cached block can serve a rounded ``request``."""
    if request <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if request < OWN_SEGMENT_FROM:
        return LARGE_SEGMENT
    return -(-request // OWN_SEGMENT_ROUNDING) * OWN_SEGMENT_ROUNDING


class CachingAllocator:
    """Serves blocks from segments and caches them; not thread-safe by itself.

    Args:
        capacity: The most bytes that can be reserved, or None for no bound.

    Attributes:
        allocated_bytes: The bytes of blocks in use, and ``peak_allocated_bytes`` the most there were.
        reserved_bytes: The bytes of segments, and ``peak_reserved_bytes`` the most there were.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        self._numbers = itertools.count()
        self._segments = itertools.count()

    def allocate(self, nbytes: int) -> Block:
        """Return a block of at least ``nbytes``.

        Raises:
            torch.OutOfMemoryError: The capacity is too small even after the cache was emptied.
        """
        size = max(ROUNDING, -(-nbytes // ROUNDING) * ROUNDING)
        small = size <= SMALL_REQUEST
        free = self._free[small]
        place = bisect.bisect_left(free, (size, 0))
        block = free.pop(place)[2] if place < len(free) else self._new_segment(size, small)
        self._split(block, size)
        block.used = True
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Take ``block`` back and join it with free neighbours."""
        if not block.used:
            raise ValueError(f"block {block.number} is not in use")
        block.used = False
        self.allocated_bytes -= block.size
        if block.before is not None and not block.before.used:
            self._uncache(block.before)
            block = self._join(block.before, block)
        if block.after is not None and not block.after.used:
            self._uncache(block.after)
            self._join(block, block.after)
        self._cache(block)

    def empty_cache(self) -> None:
        """Return every segment that is free as a whole."""
        for small, free in self._free.items():
            whole = [item for item in free if item[2].before is None and item[2].after is None]
            self.reserved_bytes -= sum(size for size, _, _ in whole)
            gone = {number for _, number, _ in whole}
            self._free[small] = [item for item in free if item[1] not in gone]

    def cached_blocks(self) -> Iterator[Block]:
        """Yield the free blocks, smallest first, small pool first."""
        for free in self._free.values():
            for _, _, block in free:
                yield block

    def _new_segment(self, size: int, small: bool) -> Block:
        nbytes = segment_bytes(size)
        if self.capacity is not None and self.reserved_bytes + nbytes > self.capacity:
            self.empty_cache()
            if self.reserved_bytes + nbytes > self.capacity:
                self._exhausted(size)
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return Block(next(self._numbers), next(self._segments), 0, nbytes, small)

    def _exhausted(self, size: int) -> None:
        import torch

        raise torch.OutOfMemoryError(
            f"predicted out of memory: tried to allocate {format_bytes(size)}; "
            f"capacity {format_bytes(self.capacity or 0)}, allocated {format_bytes(self.allocated_bytes)}, "
            f"reserved {format_bytes(self.reserved_bytes)}"
        )

    def _split(self, block: Block, size: int) -> None:
        rest = block.size - size
        if rest < ROUNDING or (not block.small and rest <= SMALL_REQUEST):
            return
        tail = Block(next(self._numbers), block.segment, block.offset + size, rest, block.small)
        tail.before, tail.after = block, block.after
        if block.after is not None:
            block.after.before = tail
        block.after, block.size = tail, size
        self._cache(tail)

    @staticmethod
    def _join(first: Block, second: Block) -> Block:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        second.before = second.after = None
        return first

    def _cache(self, block: Block) -> None:
        bisect.insort(self._free[block.small], (block.size, block.number, block))

    def _uncache(self, block: Block) -> None:
        free = self._free[block.small]
        del free[bisect.bisect_left(free, (block.size, block.number))]
