"""Where the up path is cut into stages, and each stage into tiles: the cheapest choice under a byte limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from ..errors import RequestError
from ..units import MiB
from .activations import Block, StageCost, skip_bytes, stage_cost
from .decoder_spec import DecoderSpec, LayerKind
from .grid import Tile, largest_extent, tiles_of, total_extent

CANONICAL_PEAK_BYTES = 400 * MiB
SMALLEST_TILE = 8
MULTIPLY_ADDS_PER_BYTE = 500  # a card computes about this many while the bus moves one byte


@dataclass(frozen=True)
class StagePlan:
    """Layers ``start..stop`` run tile by tile.

    Attributes:
        start: First layer.
        stop: One past the last layer.
        height: Rows of the stage's input.
        width: Columns of the stage's input.
        rows: Number of tile rows.
        cols: Number of tile columns.
        halo: Positions of the input around a tile that its kept pixels depend on.
    """

    start: int
    stop: int
    height: int
    width: int
    rows: int
    cols: int
    halo: int

    def tiles(self) -> tuple[Tile, ...]:
        """Return the tiles in reading order."""
        return tiles_of(self.height, self.width, self.rows, self.cols, self.halo)


class _Choice(NamedTuple):
    """The cheapest way found for the layers from some cut to the end."""

    work: int
    stages: tuple[StagePlan, ...]


def canonical_stages(spec: DecoderSpec, area: tuple[int, int]) -> tuple[StagePlan, ...]:
    """Return the stages of the canonical plan for latents of ``area`` (height, width)."""
    limit = CANONICAL_PEAK_BYTES
    while (stages := cheapest_stages(spec, area, 2, limit)) is None:
        limit *= 2
    return stages


def whole_stage(spec: DecoderSpec, area: tuple[int, int]) -> tuple[StagePlan, ...]:
    """Return the one stage of an untiled decode."""
    return (StagePlan(0, len(spec.layers), *area, 1, 1, spec.halo(0, len(spec.layers))),)


def fixed_tiles(spec: DecoderSpec, area: tuple[int, int], pixels: int) -> tuple[StagePlan, ...]:
    """Return stages cut in front of each enlargement, with tiles of about ``pixels`` a side.

    Raises:
        RequestError: The tile is too small to be worth its halo.
    """
    smallest = SMALLEST_TILE * spec.scale
    if pixels < smallest:
        raise RequestError("the tile is too small", need=f"at least {smallest} pixels", have=str(pixels))
    cuts = [i for i, layer in enumerate(spec.layers) if layer.kind is LayerKind.SPATIAL_UP]
    edges = [0, *cuts, len(spec.layers)]
    stages = []
    for start, stop in pairwise(edges):
        scale = spec.scale_before(start)
        height, width = area[0] * scale, area[1] * scale
        side = max(SMALLEST_TILE, pixels * scale // spec.scale)
        pieces = (1, 1) if spec.is_global(start, stop) else (-(-height // side), -(-width // side))
        stages.append(StagePlan(start, stop, height, width, *pieces, spec.halo(start, stop)))
    return tuple(stages)


def _cuts(spec: DecoderSpec) -> tuple[int, ...]:
    """Layers before which a stage may start: small tensors, and no half-enlarged skip."""
    starts = {0, len(spec.layers)}
    for index, layer in enumerate(spec.layers):
        if layer.kind in (LayerKind.TIME_UP, LayerKind.SPATIAL_UP):
            starts.add(index)
        is_last_of_up = layer.kind is LayerKind.SKIP_ADD or (
            layer.kind is LayerKind.SPATIAL_UP and spec.layers[index + 1].kind is not LayerKind.SKIP_ADD
        )
        if is_last_of_up:
            starts.add(index + 1)
    return tuple(sorted(starts))


@lru_cache(maxsize=256)
def cheapest_stages(
    spec: DecoderSpec, area: tuple[int, int], element_bytes: int, limit_bytes: int
) -> tuple[StagePlan, ...] | None:
    """Return the stages with the least work under ``limit_bytes``, or None if nothing fits."""
    cuts = _cuts(spec)
    best: dict[int, _Choice | None] = {cuts[-1]: _Choice(0, ())}
    for position in range(len(cuts) - 2, -1, -1):
        choices = []
        for stop in cuts[position + 1 :]:
            rest = best[stop]
            found = _best_grid(spec, (cuts[position], stop), area, element_bytes, limit_bytes)
            if rest is not None and found is not None:
                moved = _boundary_bytes(spec, found[1]) * MULTIPLY_ADDS_PER_BYTE
                choices.append(_Choice(found[0] + moved + rest.work, (found[1], *rest.stages)))
        best[cuts[position]] = min(choices, key=lambda c: (c.work, len(c.stages)), default=None)
    choice = best[0]
    return None if choice is None else choice.stages


def _boundary_bytes(spec: DecoderSpec, stage: StagePlan) -> int:
    """Return the bytes written and read again in front of ``stage`` for one later latent frame."""
    if stage.start == 0:
        return 0
    block = Block(spec.frames_before(stage.start, False), stage.height, stage.width, 2)
    return 2 * (block.nbytes(spec.channels_before(stage.start)) + skip_bytes(spec, stage.start, block, False))


def _best_grid(
    spec: DecoderSpec, cut: tuple[int, int], area: tuple[int, int], element_bytes: int, limit_bytes: int
) -> tuple[int, StagePlan] | None:
    """Return the cheapest grid of one stage that fits, with its multiply-adds."""
    best: tuple[int, StagePlan] | None = None
    most_cols: int | None = None
    for stage in _grids(spec, cut, area):
        if most_cols is not None and stage.cols >= most_cols:
            continue
        if largest_cost(spec, stage, element_bytes, is_first=False).peak_bytes > limit_bytes:
            continue
        most_cols = stage.cols
        work = total_cost(spec, stage, element_bytes).multiply_adds
        if best is None or work < best[0]:
            best = (work, stage)
    return best


def _grids(spec: DecoderSpec, cut: tuple[int, int], area: tuple[int, int]) -> Iterator[StagePlan]:
    """Yield the grids of a stage, coarse to fine along the columns within each number of rows."""
    start, stop = cut
    scale = spec.scale_before(start)
    height, width = area[0] * scale, area[1] * scale
    halo = spec.halo(start, stop)
    if spec.is_global(start, stop):
        yield StagePlan(start, stop, height, width, 1, 1, halo)
        return
    for rows in range(1, max(1, height // SMALLEST_TILE) + 1):
        for cols in range(1, max(1, width // SMALLEST_TILE) + 1):
            yield StagePlan(start, stop, height, width, rows, cols, halo)


def largest_cost(spec: DecoderSpec, stage: StagePlan, element_bytes: int, *, is_first: bool) -> StageCost:
    """Return the cost of the largest tile of ``stage``."""
    height = largest_extent(stage.height, stage.rows, stage.halo)
    width = largest_extent(stage.width, stage.cols, stage.halo)
    block = Block(spec.frames_before(stage.start, is_first), height, width, element_bytes)
    return stage_cost(spec, stage.start, stage.stop, block, is_first)


def total_cost(spec: DecoderSpec, stage: StagePlan, element_bytes: int) -> StageCost:
    """Return caches and multiply-adds of all tiles of ``stage`` for a later latent frame; the peak means nothing."""
    height = total_extent(stage.height, stage.rows, stage.halo)
    width = total_extent(stage.width, stage.cols, stage.halo)
    block = Block(spec.frames_before(stage.start, False), height, width, element_bytes)
    return stage_cost(spec, stage.start, stage.stop, block, False)
