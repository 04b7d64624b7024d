"""Memory beside the compute device, and copies across that never make a hidden whole-tensor temporary.

torch copies a strided view between devices through a contiguous twin on the device. For a causal cache that twin is
as large as the cache, so copies are made in groups of channels, each no larger than ``STAGING_BYTES``.

Order: all copies of a decode run on the current stream, so a cache written out and read back later needs no wait,
as long as the device does both. A strided view in host memory is gathered or scattered by the processor, which runs
beside the stream: such a copy waits for the stream on its own side.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..plan.activations import STAGING_BYTES

_log = logging.getLogger(__name__)


class OffloadMemory:
    """Makes tensors on the device or beside it.

    Args:
        device: The device that computes.
        mark_host: Context in which an allocation counts as host memory, also when both are one processor.
    """

    def __init__(
        self, device: torch.device, mark_host: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self.device = device
        self._mark_host = mark_host
        self._can_pin = device.type == "cuda" and torch.cuda.is_available()

    def on_device(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor on the device."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def on_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor in host memory, pinned where the device can use that."""
        with self._mark_host():
            if self._can_pin:
                try:
                    return torch.empty(shape, dtype=dtype, pin_memory=True)
                except RuntimeError as error:
                    _log.warning("pinned memory was refused (%s): going on with plain host memory", error)
                    self._can_pin = False
            return torch.empty(shape, dtype=dtype)


def copy_across(target: Tensor, source: Tensor, *, wait: bool = False) -> None:
    """Copy ``source`` into ``target``, both ``[1, C, F, H, W]`` and of one dtype, on any two devices.

    Args:
        target: Where to.
        source: Where from.
        wait: Return only when the processor may read ``target``.
    """
    if target.device == source.device:
        target.copy_(source)
        return
    per_channel = source[:, :1].numel() * source.element_size()
    group = max(1, STAGING_BYTES // max(1, per_channel))
    if source.device.type == "cpu" and not source[:, :group].is_contiguous():
        _settle(target.device)
    for start in range(0, source.shape[1], group):
        part = source[:, start : start + group].contiguous()
        piece = target[:, start : start + group]
        if target.device.type != "cpu" and not piece.is_contiguous():
            part = part.to(target.device, non_blocking=True)
        piece.copy_(part, non_blocking=not wait and piece.is_contiguous())


def _settle(device: torch.device) -> None:
    """Wait until what the device still writes to host memory is there."""
    if device.type == "cuda" and torch.cuda.is_available():
        torch.cuda.current_stream(device).synchronize()
