"""Where to cut rows into chunks so that no bit changes.

Matrix products of a few rows take other kernels than those of many, and threads divide the rows among themselves: in
fp32 a product of 1, 2, 3, 5, 6, 7, 9, 10 or 11 rows differs from the same rows of a larger one, on two threads. So
chunks are even, and none is small. Attention kernels take queries in groups of up to 256 and choose the size of a
group by the number of queries; chunks of whole groups, large enough for the largest group, are computed as in one go.
"""

from __future__ import annotations

from typing import NamedTuple

from .errors import RequestError

SMALLEST_ROWS = 16
QUERY_GROUP = 256
QUERY_ROWS = 2048


class Span(NamedTuple):
    """Rows ``start`` to ``stop``, the latter excluded."""

    start: int
    stop: int

    @property
    def rows(self) -> int:
        """How many."""
        return self.stop - self.start

    def within(self, start: int) -> slice:
        """Return these rows as counted from row ``start``."""
        return slice(self.start - start, self.stop - start)


def even_spans(count: int, size: int, start: int = 0) -> list[Span]:
    """Cut ``count`` rows into chunks that differ by one row at most.

    Args:
        count: Rows to cut.
        size: The most rows of a chunk; passed only where chunks would become smaller than ``SMALLEST_ROWS``.
        start: The number of the first row.

    Raises:
        RequestError: ``size`` is below ``SMALLEST_ROWS``.
    """
    check_chunk_rows(size)
    if count <= 0:
        return []
    chunks = max(1, min(-(-count // size), count // SMALLEST_ROWS))
    return _spans(count, chunks, start)


def query_spans(count: int, size: int = QUERY_ROWS) -> list[Span]:
    """Cut ``count`` queries into chunks of whole groups, as even as that allows.

    Args:
        count: Queries to cut.
        size: The most queries of a chunk; less than ``QUERY_ROWS`` counts as that.
    """
    groups = -(-count // QUERY_GROUP)
    chunks = -(-groups // (max(size, QUERY_ROWS) // QUERY_GROUP))
    spans = (Span(begin * QUERY_GROUP, min(end * QUERY_GROUP, count)) for begin, end in _spans(groups, chunks, 0))
    return list(spans)


def check_chunk_rows(size: int) -> None:
    """Raise unless chunks of ``size`` rows keep the bits.

    Raises:
        RequestError: They would not.
    """
    if size < SMALLEST_ROWS:
        raise RequestError("the chunk is too small", need=f"{SMALLEST_ROWS} rows or more", have=str(size))


def _spans(count: int, chunks: int, start: int) -> list[Span]:
    """Return ``chunks`` spans that cover ``count``, longer ones first."""
    size, longer = divmod(count, max(1, chunks))
    spans = []
    for index in range(chunks):
        stop = start + size + (index < longer)
        spans.append(Span(start, stop))
        start = stop
    return spans
