"""One ``.gguf`` file: read by the ``gguf`` package, checked against its length, its tensors mapped one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, MissingDependencyError
from ..units import format_bytes
from .tensor_info import Packing, TensorInfo, TensorLocation

if TYPE_CHECKING:
    from torch import Tensor

_PLAIN = {"F64": "F64", "F32": "F32", "F16": "F16", "BF16": "BF16", "I8": "I8", "I16": "I16", "I32": "I32"}
_ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
_REMEDY = "Download the file again."


class GgufFile:
    """The tensors of one file; packed ones are uint8 rows whose ``TensorInfo.packing`` says what they stand for.

    Args:
        path: The file.

    Raises:
        CheckpointError: The file cannot be read, is not GGUF, or ends before its last tensor.
        MissingDependencyError: The ``gguf`` package is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.infos: dict[str, TensorInfo] = {}
        self._begins: dict[str, int] = {}
        file_bytes = path.stat().st_size
        for name, info, begin in _read_entries(path):
            nbytes = info.nbytes or 0
            if begin + nbytes > file_bytes:
                raise CheckpointError(
                    f"{path} is cut off: tensor {name!r} is not whole",
                    need=format_bytes(begin + nbytes),
                    have=format_bytes(file_bytes),
                    remedy=_REMEDY,
                )
            self.infos[name], self._begins[name] = info, begin

    def location(self, name: str) -> TensorLocation:
        """Return where tensor ``name`` is."""
        info = self.infos[name]
        return TensorLocation(self.path, self._begins[name], info.nbytes or 0, info.dtype, info.shape)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield ``(name, tensor)`` for ``names``, in order; the tensors are on the CPU and map the file.

        Raises:
            CheckpointError: The file vanished or shrank since it was opened.
        """
        import torch

        try:
            file_bytes = self.path.stat().st_size
            mapped = torch.from_file(str(self.path), shared=False, size=file_bytes, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"cannot read {self.path}", have=str(error), remedy=_REMEDY) from error
        for name in names:
            yield name, _view(mapped, self.location(name))


def _view(mapped: Tensor, location: TensorLocation) -> Tensor:
    """Return a tensor of the file whose bytes are ``mapped``."""
    import torch

    names = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    names |= {"I8": "int8", "I16": "int16", "I32": "int32", "U8": "uint8"}
    raw = mapped[location.offset : location.offset + location.nbytes]
    if len(raw) < location.nbytes:
        raise CheckpointError(f"{location.path} shrank since it was opened", remedy=_REMEDY)
    return raw.view(getattr(torch, names[location.dtype])).view(location.shape)


def _read_entries(path: Path) -> Iterator[tuple[str, TensorInfo, int]]:
    """Yield name, description and first byte of every tensor in ``path``."""
    try:
        reader = _reader_class()(path)
        shapes = dict(_original_shapes(reader))
    except (ValueError, OSError, LookupError, OverflowError, TypeError, AttributeError) as error:
        raise CheckpointError(f"cannot read {path} as a GGUF file", have=str(error), remedy=_REMEDY) from error
    for name, kind, shape, begin in reader.entries:
        yield name, _info(kind, shapes.get(name, shape), path, name), begin


def _info(kind: str, shape: tuple[int, ...], path: Path, name: str) -> TensorInfo:
    """Return the description of a tensor of the GGUF type ``kind``."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    if kind in _PLAIN:
        return TensorInfo(shape, _PLAIN[kind])
    elements, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    if not shape or shape[-1] % elements:
        raise CheckpointError(f"{path} is not a whole GGUF file", have=f"{kind} {list(shape)} for tensor {name!r}")
    rows = (prod(shape[:-1]), shape[-1] // elements * nbytes)
    return TensorInfo(rows, "U8", Packing(kind, shape))


def _original_shapes(reader: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the shapes of tensors that have more dimensions than GGUF can hold."""
    for name, field in reader.fields.items():
        if name.startswith(_ORIGINAL_SHAPE):
            yield name.removeprefix(_ORIGINAL_SHAPE), tuple(int(field.parts[index][0]) for index in field.data)


@cache
def _reader_class() -> Any:
    """Return a reader that notes where tensors are, also those that a short file does not hold."""
    try:
        from gguf import GGUFReader
        from gguf.constants import GGMLQuantizationType
    except ImportError as error:
        raise MissingDependencyError(
            "GGUF files need the package gguf", remedy="Install it: pip install gguf"
        ) from error

    class HeaderReader(GGUFReader):
        """Reads everything but the tensors."""

        def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
            self.entries = []
            for field in fields:
                _, name, _, sizes, kind, offset = field.parts
                shape = tuple(int(size) for size in reversed(sizes.tolist()))
                kind_name = GGMLQuantizationType(int(kind[0])).name
                self.entries.append((bytes(name).decode("utf-8"), kind_name, shape, int(start_offs + offset[0])))

    return HeaderReader
