"""The allocator model keeps its books."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from lowmem_core.memory import CachingAllocator
from lowmem_core.memory.allocator import Block
from lowmem_core.units import MiB


def check(allocator: CachingAllocator, used: list[Block]) -> None:
    """Assert that used and cached blocks tile every segment without overlap, and the totals agree."""
    blocks = sorted([*used, *allocator.cached_blocks()], key=lambda block: (block.segment, block.offset))
    for left, right in pairwise(blocks):
        if left.segment == right.segment:
            assert left.offset + left.size == right.offset
            assert left.used or right.used, "two free neighbours were not joined"
        else:
            assert right.offset == 0
    assert sum(block.size for block in used) == allocator.allocated_bytes
    assert sum(block.size for block in blocks) == allocator.reserved_bytes


@pytest.mark.parametrize("seed", range(4))
def test_random_use_never_overlaps_and_joins_at_the_end(seed: int) -> None:
    """After any order of frees, each segment is one block again and can be returned."""
    rng, allocator, used = random.Random(seed), CachingAllocator(), []
    for step in range(600):
        if used and rng.random() < 0.45:
            allocator.free(used.pop(rng.randrange(len(used))))
        else:
            used.append(allocator.allocate(rng.choice((1, 700, MiB, 3 * MiB, 12 * MiB)) + rng.randrange(4096)))
        if step % 20 == 0:
            check(allocator, used)
    rng.shuffle(used)
    while used:
        allocator.free(used.pop())
    check(allocator, used)
    assert all(block.before is block.after is None for block in allocator.cached_blocks())
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("request_bytes", "reserved"),
    [(1, 2 * MiB), (MiB, 2 * MiB), (MiB + 1, 20 * MiB), (10 * MiB, 10 * MiB), (11 * MiB, 12 * MiB)],
)
def test_segments_have_the_documented_sizes(request_bytes: int, reserved: int) -> None:
    """Small requests share 2 MiB, larger ones 20 MiB, and from 10 MiB each gets its own, rounded to 2 MiB."""
    allocator = CachingAllocator()
    allocator.allocate(request_bytes)
    assert allocator.reserved_bytes == reserved


def test_the_cache_is_used_before_the_driver() -> None:
    """A freed block serves the next request of its size."""
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MiB))
    allocator.allocate(30 * MiB)
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (30 * MiB, 30 * MiB)


def test_the_cache_is_emptied_before_giving_up() -> None:
    """Cached segments make room; only then does the model run out, as torch does."""
    allocator = CachingAllocator(capacity=40 * MiB)
    allocator.free(allocator.allocate(30 * MiB))
    allocator.allocate(32 * MiB)
    with pytest.raises(torch.OutOfMemoryError, match=r"tried to allocate 12\.0 MiB; capacity 40\.0 MiB"):
        allocator.allocate(12 * MiB)
    assert allocator.allocated_bytes == 32 * MiB


def test_a_block_cannot_be_freed_twice() -> None:
    """A double free is an error of the caller."""
    allocator = CachingAllocator()
    block = allocator.allocate(1)
    allocator.free(block)
    with pytest.raises(ValueError, match="not in use"):
        allocator.free(block)
