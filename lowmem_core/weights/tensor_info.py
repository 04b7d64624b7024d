"""The description of one stored tensor."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}
_TORCH_NAMES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}


class Packing(NamedTuple):
    """What the bytes of a tensor stand for that is stored in packed blocks, as in GGUF files.

    Attributes:
        kind: The packed type, such as ``"Q4_K"``.
        shape: The shape of the unpacked tensor.
    """

    kind: str
    shape: tuple[int, ...]


class TensorInfo(NamedTuple):
    """Shape and dtype of a stored tensor.

    Attributes:
        shape: As it is stored: rows of bytes where it is packed.
        dtype: Spelled as in safetensors, for example ``"BF16"``; ``"U8"`` where it is packed.
        packing: What packed bytes stand for, or None.
    """

    shape: tuple[int, ...]
    dtype: str
    packing: Packing | None = None

    @property
    def unpacked_shape(self) -> tuple[int, ...]:
        """The shape of the tensor that the model knows."""
        return self.shape if self.packing is None else self.packing.shape

    @property
    def nbytes(self) -> int | None:
        """Bytes of the tensor, or None where the dtype is one we do not know the width of."""
        bits = _BITS.get(self.dtype)
        return None if bits is None else prod(self.shape) * bits // 8

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorInfo:
        """Describe ``tensor``."""
        name = str(tensor.dtype)
        return cls(tuple(tensor.shape), _TORCH_NAMES.get(name, name.removeprefix("torch.")))

    def __str__(self) -> str:
        kind = self.dtype if self.packing is None else self.packing.kind
        return f"{kind} {list(self.unpacked_shape)}"


class TensorLocation(NamedTuple):
    """Where the bytes of a stored tensor are.

    Attributes:
        path: The file.
        offset: The first byte.
        nbytes: How many.
        dtype: Spelled as in ``TensorInfo``.
        shape: Its shape.
    """

    path: Path
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
