"""Run one stage of the decoder over its tiles, and come back from an out-of-memory.

A tile is a unit of work: its input is read from the frame buffer in front of the stage, its output and its causal
state are written when it is done. So when the device runs out, that tile alone is computed again, on a lower rung:

1. as it was, after the caches have left the device and the host was asked for room;
2. in 4, then 16, 64 pieces, each with its own halo inside the tile.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..errors import DeviceMemoryError
from ..host import Devices, Interrupt
from ..place import OffloadMemory, copy_across
from ..plan.grid import Rect, Tile, tiles_of
from ..plan.stage_search import StagePlan
from ..units import format_bytes
from .causal import CausalCache, TileWindow, crop
from .layers import Activation, Attention, Layer
from .recovery import clear_device, free_words, has_room, survives

_log = logging.getLogger(__name__)
_RUNGS = ("as planned", "again with the device cleared", "in 4 pieces", "in 16 pieces", "in 64 pieces")


@dataclass
class FrameBuffer:
    """The whole frame between two stages, in host memory.

    Attributes:
        x: ``[1, C, F, H, W]``.
        skip: The remembered input of an unfinished up block, at the same height and width, or None.
    """

    x: Tensor
    skip: Tensor | None = None

    def read(self, rect: Rect, memory: OffloadMemory) -> Activation:
        """Return ``rect`` of the frame as an activation on the device."""
        skip = None if self.skip is None else _read(self.skip, rect, memory)
        return Activation(_read(self.x, rect, memory), skip)


def _read(source: Tensor, rect: Rect, memory: OffloadMemory) -> Tensor:
    view = crop(source, rect)
    target = memory.on_device(tuple(view.shape), view.dtype)
    copy_across(target, view)
    return target


class Sink(Protocol):
    """Takes the finished parts of a stage's output; a part may come twice with the same values."""

    def write(self, kept: Rect, computed: Rect, state: Activation) -> None:
        """Take the output of ``kept`` out of ``state``, which covers ``computed`` (stage input positions)."""


@dataclass(frozen=True)
class Pass:
    """One latent frame on its way through one stage."""

    source: FrameBuffer
    sink: Sink
    is_first: bool


class StageRunner:
    """Runs the layers of one stage, tile by tile.

    Args:
        plan: The stage.
        layers: Its layers.
        cache: Its causal cache.
        memory: Where tensors are made.
        needed_bytes: Activations of the largest tile, checked against free memory before each tile.
    """

    def __init__(
        self,
        plan: StagePlan,
        layers: tuple[Layer, ...],
        cache: CausalCache,
        memory: OffloadMemory,
        needed_bytes: int,
    ) -> None:
        self._plan, self._layers, self._cache = plan, layers, cache
        self._memory, self._needed_bytes = memory, needed_bytes
        self._tiles = plan.tiles()

    def run(self, step: Pass, devices: Devices, interrupt: Interrupt) -> Iterator[int]:
        """Run all tiles of one latent frame, yielding the number of each that is done.

        Raises:
            DeviceMemoryError: A tile does not fit, however small its pieces.
        """
        for number in range(len(self._tiles)):
            interrupt.check()
            rungs = range(len(_RUNGS))
            if not any(self._attempt(number, rung, step, devices) for rung in rungs):
                raise self._exhausted(number, devices)
            yield number

    def _attempt(self, number: int, rung: int, step: Pass, devices: Devices) -> bool:
        """Try one rung; return whether the tile is done. The next rung runs outside of any ``except``."""
        tile = self._tiles[number]
        if rung:
            _log.warning("tile %d ran out of device memory: %s", number, _RUNGS[rung])
            clear_device(devices, self._cache, self._needed_bytes)
        pieces = self._pieces(tile, 2 ** max(0, rung - 1))
        if not pieces or not has_room(devices, self._needed_bytes // len(pieces)):
            return False
        return survives(lambda: self._run_pieces(number, pieces, step))

    def _run_pieces(self, number: int, pieces: tuple[Tile, ...], step: Pass) -> None:
        self._cache.begin(number)
        for piece in pieces:
            self._run_piece(number, piece, step)
        self._cache.commit(number)

    def _run_piece(self, number: int, piece: Tile, step: Pass) -> None:
        """Compute one piece, given in positions counted from its tile's corner."""
        tile = self._tiles[number]
        corner = (tile.extent.rows.start, tile.extent.cols.start)
        size = (tile.extent.rows.size, tile.extent.cols.size)
        window = TileWindow(self._cache, number, size, piece.extent, piece.kept)
        computed = piece.extent.shifted(*corner)
        state = step.source.read(computed, self._memory)
        for layer in self._layers:
            layer.run(state, window, step.is_first)
        kept = piece.kept.shifted(*corner).overlap(tile.kept)
        if kept.area:
            step.sink.write(kept, computed, state)

    def _pieces(self, tile: Tile, per_side: int) -> tuple[Tile, ...]:
        """Cut the tile with its halo, counted from its own corner; nothing where it cannot be cut so finely."""
        height, width = tile.extent.rows.size, tile.extent.cols.size
        if per_side > 1 and (
            min(height, width) < 2 * per_side or any(isinstance(layer, Attention) for layer in self._layers)
        ):
            return ()
        return tiles_of(height, width, per_side, per_side, self._plan.halo)

    def _exhausted(self, number: int, devices: Devices) -> DeviceMemoryError:
        return DeviceMemoryError(
            f"tile {number} of the decode ran out of device memory on every rung",
            need=f"about {format_bytes(self._needed_bytes)} for activations",
            have=free_words(devices),
            remedy="Close other programs on the card, or decode with a smaller device budget.",
        )
