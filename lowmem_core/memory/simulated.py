"""Running real model code on a GPU that is not there, to learn what memory it would take.

``FakeTensorMode`` gives tensors a shape, a dtype and a device but no data, and their storages live and die as real ones
do. One thing must be corrected: without a driver, attention falls back to a form that writes the whole score matrix,
which no GPU would do. Inside ``simulation`` it is sent to the fused operator that a GPU would choose. Workspaces of
cuDNN and cuBLAS, the CUDA context and scratch memory inside kernels are not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..errors import RequestError
from .allocator import ROUNDING, CachingAllocator
from .live_meter import LiveStorageMeter

FLASH_MAX_HEAD = 256

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class SimulatedMeter(LiveStorageMeter):
    """Counts storages of a simulated device as its allocator would, in multiples of 512 bytes.

    Args:
        device: The device that the simulated tensors name.
        allocator: A model that also tells reserved bytes; with a capacity it predicts running out of memory.
        limit_bytes: The most device bytes allowed.
    """

    def __init__(
        self,
        device: torch.device | str = "cuda",
        allocator: CachingAllocator | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        super().__init__(device, limit_bytes, round_to=ROUNDING, allocator=allocator)
        self.allocator = allocator

    @property
    def measured_by(self) -> str | None:
        """The name of the method."""
        return "simulated"


@contextmanager
def simulation() -> Iterator[FakeTensorMode]:
    """Make every tensor fake and attention memory-faithful on this thread while the context lasts."""
    with FakeTensorMode(allow_non_fake_inputs=False) as mode, _FusedAttention():
        yield mode


def is_simulated(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has no data."""
    return isinstance(tensor, FakeTensor)


def fake_module(
    build: Callable[[], ModuleT], device: torch.device | str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> ModuleT:
    """Build a frozen module in evaluation mode whose parameters are fake; call it inside ``simulation``.

    Args:
        build: Constructs the module; tensors that name no device or dtype get the ones below.
        device: Where the parameters seem to be.
        dtype: The floating-point type of the parameters.

    Raises:
        RequestError: No simulation is active.
    """
    if not any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack()):
        raise RequestError("a fake module needs an active simulation", remedy="Call it inside `with simulation():`.")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            module = build()
    finally:
        torch.set_default_dtype(before)
    return module.requires_grad_(False).eval()


class _FusedAttention(TorchFunctionMode):
    """Sends ``F.scaled_dot_product_attention`` to the operator a GPU would choose."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace attention; call everything else as it is."""
        if func is F.scaled_dot_product_attention:
            return fused_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Attend with the flash operator (16-bit, heads up to 256, no mask), else with the memory-efficient one.

    Args:
        query: ``[B, heads, S, D]``; ``key`` and ``value`` likewise, of their own length.
        key: See ``query``.
        value: See ``query``.
        attn_mask: Added to the scores, or boolean.
        dropout_p: Ignored in evaluation, as the simulation runs no training.
        is_causal: Whether a position attends only to earlier ones.
        options: ``scale`` and ``enable_gqa``, as torch defines them.
    """
    scale = options.get("scale")
    half = query.dtype in (torch.float16, torch.bfloat16)
    if half and query.shape[-1] <= FLASH_MAX_HEAD and attn_mask is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention.default
        attended: torch.Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return attended
    if options.get("enable_gqa"):
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    if attn_mask is not None:
        attn_mask = _additive(attn_mask, query.dtype).expand(*query.shape[:-1], key.shape[-2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    attended = efficient(query, key, value, attn_mask, False, dropout_p, is_causal, scale=scale)[0]
    return attended


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``mask`` as numbers to add: 0 where attended, minus infinity where not."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf"))
