"""Small moving pictures for the writer's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lowmem_core.frames import FrameChunk

av = pytest.importorskip("av")

Clip = Callable[..., Iterator[FrameChunk]]


@pytest.fixture
def clip() -> Clip:
    """Return a function that yields ``frames`` moving frames in chunks of ``step``."""
    noise = torch.rand(160, 256, 3, generator=torch.Generator().manual_seed(0))

    def make(frames: int, *, size: tuple[int, int] = (64, 96), step: int = 4) -> Iterator[FrameChunk]:
        height, width = size
        for first in range(0, frames, step):
            count = min(step, frames - first)
            views = [noise[i % 64 : i % 64 + height, i % 64 : i % 64 + width] for i in range(first, first + count)]
            yield FrameChunk(torch.stack(views), first)

    return make


@pytest.fixture
def decode() -> Callable[[Path], list[Any]]:
    """Return a function that decodes the frames of a video file."""

    def frames_of(path: Path) -> list[Any]:
        with av.open(str(path)) as container:
            return list(container.decode(video=0))

    return frames_of
