"""A linear layer whose weight stays as small as it is stored, and is unpacked where it computes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .encodings import Encoding, decoded


class QuantisedLinear(nn.Module):
    """A drop-in for ``nn.Linear``: the same product, with a weight that is decoded for each call and then dropped.

    Parameters are ``weight``, of the stored dtype and shape, ``scale`` (float32, one value or one per row) where there
    is one, and ``bias``.

    Args:
        linear: The layer to stand in for; its tensors are not read.
        encoding: How its weight is stored.
        scale_shape: Shape of the scale, or None.
    """

    def __init__(self, linear: nn.Linear, encoding: Encoding, scale_shape: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.encoding = encoding
        device = linear.weight.device
        raw = torch.empty(encoding.storage_shape, dtype=encoding.storage_dtype, device=device)
        self.weight = nn.Parameter(raw, requires_grad=False)
        scale = None if scale_shape is None else torch.empty(scale_shape, dtype=torch.float32, device=device)
        self.scale = None if scale is None else nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the weight: ``[out_features, in_features]`` in ``dtype``, on the device of the stored one."""
        return decoded(self.weight, self.encoding, self.scale, dtype)

    def forward(self, values: Tensor) -> Tensor:
        """Return ``values`` ``[..., in_features]`` times the weight, plus the bias, in the dtype of ``values``."""
        bias = None if self.bias is None else self.bias.to(values.dtype)
        return F.linear(values, self.dequantised(values.dtype), bias)

    def extra_repr(self) -> str:
        """Say what is stored."""
        return f"in_features={self.in_features}, out_features={self.out_features}, stored={self.encoding.kind}"


def quantise_linears(module: nn.Module, encodings: Mapping[str, tuple[Encoding, tuple[int, ...] | None]]) -> None:
    """Put a ``QuantisedLinear`` in place of each linear layer that is stored in few bits.

    Args:
        module: A skeleton.
        encodings: Encoding and shape of the scale, by the name of the layer.
    """
    for name, (encoding, scale_shape) in encodings.items():
        parent_name, _, leaf = name.rpartition(".")
        parent = module.get_submodule(parent_name)
        linear = parent.get_submodule(leaf)
        assert isinstance(linear, nn.Linear)
        setattr(parent, leaf, QuantisedLinear(linear, encoding, scale_shape))


def largest_dequantised_bytes(module: nn.Module, itemsize: int) -> int:
    """Return the bytes of the largest weight of ``module`` that is decoded for a call, in ``itemsize`` bytes each."""
    sizes = [one.in_features * one.out_features for one in module.modules() if isinstance(one, QuantisedLinear)]
    return max(sizes, default=0) * itemsize
