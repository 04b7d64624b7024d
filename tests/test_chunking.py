"""Chunks are even, cover everything once, and are never so small that bits change."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from lowmem_core.chunking import QUERY_GROUP, QUERY_ROWS, SMALLEST_ROWS, even_spans, query_spans
from lowmem_core.errors import RequestError

COUNTS = [1, 2, 15, 16, 17, 31, 32, 33, 100, 1000, 1024, 1025, 4097, 32760]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", [16, 17, 64, 1000, 1024])
def test_even_chunks_cover_the_rows_once(count: int, size: int) -> None:
    """None is longer than asked or shorter than what keeps bits, unless there are too few rows for that."""
    spans = even_spans(count, size, start=5)
    assert [row for span in spans for row in range(span.start, span.stop)] == list(range(5, 5 + count))
    rows = [span.rows for span in spans]
    assert max(rows) - min(rows) <= 1
    assert min(rows) >= min(count, SMALLEST_ROWS)
    assert max(rows) <= max(size, 2 * SMALLEST_ROWS - 1)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", [16, 2048, 3000, 4096])
def test_chunks_of_queries_are_whole_groups(count: int, size: int) -> None:
    """Only the last one may end within a group."""
    spans = query_spans(count, size)
    assert [row for span in spans for row in range(span.start, span.stop)] == list(range(count))
    assert all(span.rows % QUERY_GROUP == 0 for span in spans[:-1])
    assert max(span.rows for span in spans) <= max(size, QUERY_ROWS)


def test_no_rows_make_no_chunk() -> None:
    """Nothing is called for nothing."""
    assert even_spans(0, 64) == []


def test_chunks_that_would_change_bits_are_refused() -> None:
    """With the smallest size that does not."""
    with pytest.raises(RequestError, match="need 16 rows or more; have 15"):
        even_spans(100, 15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 64, 1000])
def test_products_of_chunks_have_the_bits_of_the_whole(dtype: torch.dtype, size: int) -> None:
    """A linear layer gives each row the same values in a chunk."""
    generator = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(1009, 256, generator=generator).to(dtype), torch.randn(384, 256, generator=generator)
    whole = functional.linear(rows, weight.to(dtype))
    for span in even_spans(len(rows), size):
        part = functional.linear(rows[span.start : span.stop], weight.to(dtype))
        assert torch.equal(part, whole[span.start : span.stop])
