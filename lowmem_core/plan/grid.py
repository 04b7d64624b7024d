"""Rectangles and how a frame is cut into tiles: even pieces, each with a halo clipped to the frame."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple


class Span(NamedTuple):
    """Half-open range of positions along one side."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of positions."""
        return self.stop - self.start

    def grown(self, halo: int, limit: int) -> Span:
        """Return the span with ``halo`` more on both sides, kept inside ``0..limit``."""
        return Span(max(0, self.start - halo), min(limit, self.stop + halo))

    def scaled(self, factor: int) -> Span:
        """Return the span in positions ``factor`` times finer."""
        return Span(self.start * factor, self.stop * factor)

    def overlap(self, other: Span) -> Span:
        """Return the positions in both spans, an empty span if there are none."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def moved(self, origin: int) -> Span:
        """Return the span counted from ``origin``."""
        return Span(self.start - origin, self.stop - origin)


class Rect(NamedTuple):
    """Rows and columns of a frame."""

    rows: Span
    cols: Span

    @property
    def area(self) -> int:
        """Number of positions."""
        return self.rows.size * self.cols.size

    def scaled(self, factor: int) -> Rect:
        """Return the rectangle in positions ``factor`` times finer."""
        return Rect(self.rows.scaled(factor), self.cols.scaled(factor))

    def shifted(self, down: int, right: int) -> Rect:
        """Return the rectangle moved by ``down`` rows and ``right`` columns."""
        return Rect(self.rows.moved(-down), self.cols.moved(-right))

    def overlap(self, other: Rect) -> Rect:
        """Return what both cover; its area is zero if they do not meet."""
        return Rect(self.rows.overlap(other.rows), self.cols.overlap(other.cols))

    def relative_to(self, outer: Rect) -> Rect:
        """Return the rectangle counted from the corner of ``outer``."""
        return Rect(self.rows.moved(outer.rows.start), self.cols.moved(outer.cols.start))


class Tile(NamedTuple):
    """A piece of a frame: what is kept of it, and what must be computed to keep that exactly."""

    kept: Rect
    extent: Rect


def split_evenly(length: int, pieces: int) -> tuple[Span, ...]:
    """Cut ``0..length`` into ``pieces`` spans whose sizes differ by at most one."""
    edges = [length * index // pieces for index in range(pieces + 1)]
    return tuple(Span(a, b) for a, b in pairwise(edges))


def tiles_of(height: int, width: int, rows: int, cols: int, halo: int) -> tuple[Tile, ...]:
    """Cut a frame into ``rows`` x ``cols`` tiles in reading order."""
    return tuple(
        Tile(Rect(row, col), Rect(row.grown(halo, height), col.grown(halo, width)))
        for row in split_evenly(height, rows)
        for col in split_evenly(width, cols)
    )


def largest_extent(length: int, pieces: int, halo: int) -> int:
    """Return the longest side of a tile with its halo when ``length`` is cut into ``pieces``."""
    return max(span.grown(halo, length).size for span in split_evenly(length, pieces))


def total_extent(length: int, pieces: int, halo: int) -> int:
    """Return the sum of the tiles' sides with their halos."""
    return sum(span.grown(halo, length).size for span in split_evenly(length, pieces))
