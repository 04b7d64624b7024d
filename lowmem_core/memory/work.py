"""Counting multiply-adds from the shapes of operators, so that two ways to one result can be compared."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch._ops import OpOverload

from .observe import ObservingMode

aten = torch.ops.aten


class MultiplyAddCounter(ObservingMode):  # type: ignore[no-untyped-call]
    """Counts multiply-adds of convolutions, matrix products and fused attention on this thread while entered.

    Padding counts as work, and a causal mask saves none. Works with fake tensors too.

    Attributes:
        total: Multiply-adds so far.
        by_operator: The same, by operator name.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_operator: dict[str, int] = {}

    @property
    def total(self) -> int:
        """Multiply-adds so far."""
        return sum(self.by_operator.values())

    def observe(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func`` and count its work."""
        result = func(*args, **kwargs)
        packet = func.overloadpacket if isinstance(func, OpOverload) else func
        count = _COUNTS.get(packet)
        if count is not None:
            name = str(packet)
            self.by_operator[name] = self.by_operator.get(name, 0) + count(args, result)
        return result


def _convolution(args: tuple[Any, ...], result: Any) -> int:
    """Count a convolution ``(input, weight, bias, stride, padding, dilation, transposed, ...)``.

    Each place of the output (of the input, if transposed) meets one slice of the weight, ``weight.shape[1:]``.
    """
    data, weight, transposed = args[0], args[1], args[6]
    places = data if transposed else result
    return int(places.numel() * prod(weight.shape[1:]))


def _product(args: tuple[Any, ...], result: Any) -> int:
    """Count a product ``(left, right)``: each result element sums over the last axis of ``left``."""
    return int(result.numel()) * int(args[0].shape[-1])


def _added_product(args: tuple[Any, ...], result: Any) -> int:
    """Count a product ``(addend, left, right)``."""
    return _product(args[1:], result)


def _attention(args: tuple[Any, ...], result: Any) -> int:
    """Count attention ``(query, key, value)``: scores, then the weighted sum of values."""
    query, key, value = args[:3]
    return int(prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1]))


_COUNTS: dict[Any, Callable[[tuple[Any, ...], Any], int]] = {
    aten.convolution: _convolution,
    aten.mm: _product,
    aten.bmm: _product,
    aten.mv: _product,
    aten.addmm: _added_product,
    aten.addmv: _added_product,
    aten.baddbmm: _added_product,
    aten._scaled_dot_product_flash_attention: _attention,
    aten._scaled_dot_product_efficient_attention: _attention,
    aten._scaled_dot_product_cudnn_attention: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_fused_attention_overrideable: _attention,
}
