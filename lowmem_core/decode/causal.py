"""The causal cache of a tiled decode: per tile, what each causal convolution remembers of the past.

A cache belongs to one decode, never to the VAE. It changes only when a tile is finished: a pass reads the committed
tensors and writes pending ones, and ``commit`` exchanges them. So a tile that ran out of memory half way starts again
from the same state. The exchanged tensors are used for the next tile of the same shape: beside the caches there is
one tile's worth of spares, not a second set.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..place import OffloadMemory, copy_across
from ..plan.activations import CACHE_FRAMES
from ..plan.grid import Rect


class CausalCache:
    """What all tiles of one stage remember.

    Args:
        memory: Where tensors are made.
        convolutions: Number of causal convolutions in the stage.
        on_device: Keep the tensors on the device.
        is_poisoned: Fill released tensors with NaN, so that a test sees who reads one.
    """

    def __init__(self, memory: OffloadMemory, convolutions: int, *, on_device: bool, is_poisoned: bool = False) -> None:
        self._memory, self._convolutions = memory, convolutions
        self._on_device, self._is_poisoned = on_device, is_poisoned
        self._committed: dict[int, list[Tensor | None]] = {}
        self._pending: list[Tensor | None] = []
        self._spares: list[Tensor] = []

    def begin(self, tile: int) -> None:
        """Start a pass over ``tile``, forgetting an unfinished one and the spares of tiles of another shape."""
        self._release(self._pending)
        self._pending = [None] * self._convolutions
        self._keep_spares(self._committed.get(tile, []))

    def commit(self, tile: int) -> None:
        """Make what the pass remembered the state of ``tile``."""
        self._release(self._committed.get(tile, []))
        self._committed[tile], self._pending = self._pending, []

    def committed(self, tile: int, convolution: int) -> Tensor | None:
        """Return what ``convolution`` remembers of ``tile``, or None before the first frame."""
        return self._committed[tile][convolution] if tile in self._committed else None

    def pending(self, convolution: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor that will be the state of ``convolution``, made on first use."""
        tensor = self._pending[convolution]
        if tensor is None:
            tensor = self._pending[convolution] = self._make(shape, dtype)
        return tensor

    def move_to_host(self) -> None:
        """Leave the device: it is needed for the tiles themselves."""
        self._on_device = False
        self._spares.clear()
        self._pending = []
        for state in self._committed.values():
            for index, tensor in enumerate(state):
                if tensor is not None and tensor.device.type != "cpu":
                    on_host = self._memory.on_host(tuple(tensor.shape), tensor.dtype)
                    copy_across(on_host, tensor)
                    state[index] = on_host

    def _make(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        for index, spare in enumerate(self._spares):
            if tuple(spare.shape) == shape:
                return self._spares.pop(index)
        make = self._memory.on_device if self._on_device else self._memory.on_host
        return make(shape, dtype)

    def _release(self, tensors: list[Tensor | None]) -> None:
        released = [tensor for tensor in tensors if tensor is not None]
        if not released:
            return
        if self._is_poisoned:
            for tensor in released:
                tensor.fill_(float("nan"))
        self._keep_spares(tensors)
        self._spares += released

    def _keep_spares(self, like: list[Tensor | None]) -> None:
        """Drop the spares that have not the shape of one of ``like``."""
        shapes = {tuple(tensor.shape) for tensor in like if tensor is not None}
        self._spares = [spare for spare in self._spares if tuple(spare.shape) in shapes]


class TileWindow:
    """One pass over a tile, or over a piece of it, as the layers see it.

    Args:
        cache: The stage's cache, after ``begin``.
        tile: Number of the tile.
        size: Rows and columns of the tile with its halo, at the stage's input.
        extent: The piece that is computed, counted from the tile's corner.
        kept: The part of it whose state is remembered, counted likewise.
    """

    def __init__(self, cache: CausalCache, tile: int, size: tuple[int, int], extent: Rect, kept: Rect) -> None:
        self._cache, self._tile = cache, tile
        self._size, self._extent, self._kept = size, extent, kept
        self._next = 0

    def load(self, view: Tensor) -> None:
        """Fill ``view`` with the last two positions in time, if there are any."""
        old = self._cache.committed(self._tile, self._next)
        if old is not None:
            copy_across(view, crop(old, self._extent.scaled(self._scale(view))))

    def store(self, view: Tensor) -> None:
        """Remember the kept part of ``view`` and go to the next convolution."""
        scale = self._scale(view)
        shape = (1, view.shape[1], CACHE_FRAMES, self._size[0] * scale, self._size[1] * scale)
        new = self._cache.pending(self._next, shape, view.dtype)
        inside = self._kept.relative_to(self._extent).scaled(scale)
        copy_across(crop(new, self._kept.scaled(scale)), crop(view, inside))
        self._next += 1

    def skip(self) -> None:
        """Go to the next convolution; it still remembers nothing."""
        self._next += 1

    def _scale(self, view: Tensor) -> int:
        return int(view.shape[-2]) // self._extent.rows.size


def crop(tensor: Tensor, rect: Rect) -> Tensor:
    """Return the view of ``rect`` in the last two dimensions."""
    return tensor[..., rect.rows.start : rect.rows.stop, rect.cols.start : rect.cols.stop]
