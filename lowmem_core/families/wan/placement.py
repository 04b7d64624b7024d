"""Wan's transformers on the device: as a whole, one after the other, or streamed in blocks under a byte limit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from ...place import StreamedModule, StreamOptions, WeightStreamer, inventory_of
from ...plan import WeightInventory
from ...plan.denoise_plan import STREAM, DenoisePlan
from ...units import format_bytes
from ...weights import TensorLocation

_log = logging.getLogger("lowmem")
_ALIGNED = 64


class Placeable(Protocol):
    """A loaded transformer, its weights in host memory or still on disk."""

    @property
    def module(self) -> nn.Module:
        """The transformer."""

    @property
    def locations(self) -> Mapping[str, TensorLocation]:
        """Where its tensors are on disk; empty when they are in host memory."""


def blocks_of(transformer: nn.Module) -> Sequence[nn.Module]:
    """Return the repeated layers of a ``WanTransformer3DModel`` in running order."""
    blocks: Any = transformer.blocks
    return list(blocks)


def inventories_of(transformers: Sequence[Placeable]) -> list[WeightInventory]:
    """Return the weight bytes of each transformer."""
    return [inventory_of(loaded.module, blocks_of(loaded.module)) for loaded in transformers]


@contextmanager
def placed(
    transformers: Sequence[Placeable],
    plan: DenoisePlan,
    device: torch.device,
    options: StreamOptions | None = None,
    invalidate: Callable[[], None] = lambda: None,
) -> Iterator[WeightStreamer | None]:
    """Keep the transformers where ``plan`` says while the context lasts.

    Args:
        transformers: One, or the high-noise and the low-noise one.
        plan: Their placement, in the same order.
        device: Where they compute.
        options: How to stream.
        invalidate: Called if a module could not be put back and must be loaded again.

    Yields:
        The streamer, or None where the modules are used where they are: a resident run on the processor.
    """
    if plan.memory_mode != STREAM and device.type == "cpu" and all(_is_ready(loaded) for loaded in transformers):
        yield None
        return
    modules = [
        StreamedModule(loaded.module, blocks_of(loaded.module), stream, loaded.locations or None, invalidate)
        for loaded, stream in zip(transformers, plan.streams, strict=True)
    ]
    with WeightStreamer(modules, device, options) as streamer:
        if plan.memory_mode == STREAM:
            _log.info(
                "Wan memory optimization: limiting resident transformer weights to about %s",
                format_bytes(streamer.device_bytes),
            )
        yield streamer


def _is_ready(loaded: Placeable) -> bool:
    """Return whether a processor may use the tensors where they are.

    Tensors that map a file may begin at any byte, and kernels give other bits for those than for aligned copies.
    """
    if loaded.locations:
        return False
    tensors = [*loaded.module.parameters(), *loaded.module.buffers()]
    return all(tensor.data_ptr() % _ALIGNED == 0 for tensor in tensors)


@contextmanager
def polled(transformer: nn.Module, poll: Callable[[], None]) -> Iterator[None]:
    """Call ``poll``, which may raise to stop, before each block of ``transformer`` while the context lasts."""
    handles = [block.register_forward_pre_hook(lambda *_: poll()) for block in blocks_of(transformer)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
