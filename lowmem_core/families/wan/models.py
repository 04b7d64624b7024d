"""Which Wan files a run uses, and a shelf that keeps the last ones loaded."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...denoise import LoraUse, file_marks
from ...errors import RequestError
from .config import WanConfig
from .load import LoadedTransformer, load_wan_transformer

TEXT_BOUNDARY = 0.875
IMAGE_BOUNDARY = 0.9


@dataclass(frozen=True)
class WanFiles:
    """The files of a Wan model: a handle that holds no weights.

    Attributes:
        high_noise: The transformer for the beginning, or the only one.
        low_noise: The one for the end, of models that have two.
        dtype: What they compute in; None for that of the first file.
        loras: On which transformer, 0 or 1, and how strongly.
        boundary_ratio: Where the second takes over; None for what the model was trained with.
    """

    high_noise: Path
    low_noise: Path | None = None
    dtype: torch.dtype | None = None
    loras: tuple[LoraUse, ...] = ()
    boundary_ratio: float | None = None

    def __post_init__(self) -> None:
        if self.boundary_ratio is not None and self.low_noise is None:
            raise RequestError("a boundary lies between two transformers", need="a low-noise one too", have="one")
        for use in self.loras:
            if not 0 <= use.model < len(self.paths):
                raise RequestError(
                    f"there is no transformer for {use.path.name}",
                    need=f"0 to {len(self.paths) - 1}",
                    have=str(use.model),
                    remedy="Load the low-noise transformer, or put the LoRA on the first one.",
                )

    @property
    def paths(self) -> tuple[Path, ...]:
        """The weight files, in the order in which they run."""
        return (self.high_noise,) if self.low_noise is None else (self.high_noise, self.low_noise)

    def boundary(self, config: WanConfig) -> float | None:
        """Return the boundary for models of ``config``; None where there is one transformer."""
        if self.low_noise is None:
            return None
        if self.boundary_ratio is not None:
            return self.boundary_ratio
        return IMAGE_BOUNDARY if config.condition_channels else TEXT_BOUNDARY


class ModelShelf:
    """Keeps transformers loaded between runs, the least recently used leaving first; a changed file is loaded anew.

    Args:
        capacity: How many to keep.
    """

    def __init__(self, capacity: int = 4) -> None:
        self._capacity = capacity
        self._held: OrderedDict[tuple[Any, ...], LoadedTransformer] = OrderedDict()
        self._lock = threading.Lock()

    def load(self, files: WanFiles, *, from_disk: bool) -> tuple[LoadedTransformer, ...]:
        """Return the transformers of ``files``; with ``from_disk`` their bytes stay there.

        Raises:
            CheckpointError: A file cannot be loaded.
        """
        loaded: list[LoadedTransformer] = []
        for path in files.paths:
            dtype = files.dtype or (loaded[0].dtype if loaded else None)
            loaded.append(self._get(path, dtype, from_disk))
        return tuple(loaded)

    def describe(self, files: WanFiles) -> tuple[LoadedTransformer, ...]:
        """Return the transformers for looking at their sizes: with weights if they are here, else without."""
        known: list[LoadedTransformer] = []
        for path in files.paths:
            dtype = files.dtype or (known[0].dtype if known else None)
            with self._lock:
                held = self._held.get(_key(path, dtype, from_disk=False))
            if held is None:
                return self.load(files, from_disk=True)
            known.append(held)
        return tuple(known)

    def invalidator(self, transformers: Sequence[LoadedTransformer]) -> Callable[[], None]:
        """Return a function that takes ``transformers`` off the shelf: they were not put back as they were."""

        def invalidate() -> None:
            with self._lock:
                for key in [key for key, held in self._held.items() if any(held is one for one in transformers)]:
                    del self._held[key]

        return invalidate

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._held.clear()

    def _get(self, path: Path, dtype: torch.dtype | None, from_disk: bool) -> LoadedTransformer:
        key = _key(path, dtype, from_disk)
        with self._lock:
            held = self._held.pop(key, None)
            for stale in [other for other in self._held if other[0] == key[0] and other[1] != key[1]]:
                del self._held[stale]
        loaded = held or load_wan_transformer(path, dtype, from_disk=from_disk)
        with self._lock:
            self._held[key] = loaded
            while len(self._held) > self._capacity:
                self._held.popitem(last=False)
        return loaded


def _key(path: Path, dtype: torch.dtype | None, from_disk: bool) -> tuple[Any, ...]:
    """Return what tells one loaded file from another, its time of last change included."""
    return path.resolve(), tuple(file_marks(path)), dtype, from_disk
