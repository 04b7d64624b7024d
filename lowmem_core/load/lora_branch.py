"""What a LoRA adds to the output of a linear layer, beside a weight that stays as it is.

The branch is a submodule of the layer, so its factors are parameters like any other: they are counted, placed and
streamed with the block that the layer is in. A hook adds what it computes, so the layer itself may be of any kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .placeholder import placeholder
from .quantised import QuantisedLinear

BRANCHES = "loras"
"""What the branches of a layer are called among its submodules."""


class LoraBranch(nn.Module):
    """Adds ``strength * (up(inner_scale * down(x)) + bias)``, each part of it where there is one.

    Parameters are ``down`` ``[rank, in]``, ``up`` ``[out, rank]`` and ``bias`` ``[out]``; without ``down``, ``up`` is a
    whole difference ``[out, in]``, and without both the bias alone is added. They are made without values.

    Args:
        shapes: Of the parameters that there are.
        dtype: Of the parameters.
        inner_scale: Alpha over rank.
        strength: How strongly it is applied.
    """

    down: nn.Parameter | None
    up: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, inner_scale: float, strength: float
    ) -> None:
        super().__init__()
        self.inner_scale, self.strength = inner_scale, strength
        for name in ("down", "up", "bias"):
            shape = shapes.get(name)
            parameter = None if shape is None else nn.Parameter(placeholder(shape, dtype), requires_grad=False)
            self.register_parameter(name, parameter)

    def forward(self, values: Tensor, output: Tensor) -> Tensor:
        """Return ``output`` ``[..., out]`` plus what the branch makes of ``values`` ``[..., in]``, as a new tensor.

        The arithmetic, and so every bit, is that of peft: the product is scaled, then added.
        """
        bias = None if self.bias is None else self.bias.to(values.dtype)
        if self.up is None:
            return output if bias is None else output + bias * self.strength
        if self.down is not None:
            values = _scaled(F.linear(values, self.down.to(values.dtype)), self.inner_scale)
        change = _scaled(F.linear(values, self.up.to(values.dtype), bias), self.strength)
        return change.add_(output) if change.dtype == output.dtype else output + change.to(output.dtype)

    def extra_repr(self) -> str:
        """Say how strong it is."""
        return f"strength={self.strength}, inner_scale={self.inner_scale}"


def takes_branches(layer: nn.Module) -> bool:
    """Return whether ``layer`` is linear."""
    return isinstance(layer, (nn.Linear, QuantisedLinear))


def linear_shape(layer: nn.Module) -> tuple[int, int]:
    """Return ``(out, in)`` of a linear layer, however its weight is stored."""
    assert isinstance(layer, (nn.Linear, QuantisedLinear))
    return layer.out_features, layer.in_features


def widest_branch(module: nn.Module) -> int:
    """Return the most values that a branch in ``module`` makes of one token, 0 without any.

    While a branch runs, as many more values are alive as the layer gives.
    """
    widths = [len(one.up) for one in module.modules() if isinstance(one, LoraBranch) and one.up is not None]
    return max(widths, default=0)


@contextmanager
def branched(layers: Sequence[tuple[nn.Module, Sequence[LoraBranch]]]) -> Iterator[None]:
    """Let linear layers add their branches, in order, while the context lasts; everything is as before afterwards."""
    handles = []
    try:
        for layer, branches in layers:
            layer.add_module(BRANCHES, nn.ModuleList(branches))
            handles.append(layer.register_forward_hook(partial(_add, branches), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for layer, _ in layers:
            layer._modules.pop(BRANCHES, None)


def _add(
    branches: Sequence[LoraBranch], _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> Tensor:
    (values,) = (*args, *kwargs.values())
    for branch in branches:
        output = branch(values, output)
    return output


def _scaled(values: Tensor, scale: float) -> Tensor:
    """Multiply ``values`` in place."""
    return values if scale == 1.0 else values.mul_(scale)
