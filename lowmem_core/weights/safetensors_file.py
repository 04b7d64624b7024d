"""One ``.safetensors`` file: its header checked against its length, its tensors read one by one.

The header is read here and not by the safetensors library, because the library says only that a file is
damaged, and a user with a broken download wants to know which file and from which tensor on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from ..units import format_bytes
from .tensor_info import TensorInfo, TensorLocation

if TYPE_CHECKING:
    from torch import Tensor

_LONGEST_HEADER_BYTES = 100_000_000
_REMEDY = "Download the file again."


class SafetensorsFile:
    """The tensors of one file; no file handle is kept open between calls.

    Args:
        path: The file.

    Raises:
        CheckpointError: The file cannot be read, is not safetensors, or ends before its last tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.infos: dict[str, TensorInfo] = {}
        self._begins: dict[str, int] = {}
        for name, info, begin in _read_entries(path):
            self.infos[name] = info
            self._begins[name] = begin

    def location(self, name: str) -> TensorLocation | None:
        """Return where tensor ``name`` is, or None if the width of its dtype is unknown."""
        info = self.infos[name]
        if info.nbytes is None:
            return None
        return TensorLocation(self.path, self._begins[name], info.nbytes, info.dtype, info.shape)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield ``(name, tensor)`` for ``names``, in order; the tensors are on the CPU and map the file.

        Raises:
            CheckpointError: The file changed or vanished since it was opened.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(self.path), framework="pt", device="cpu") as handle:
                for name in names:
                    yield name, handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {self.path}", have=str(error), remedy=_REMEDY) from error


def _read_entries(path: Path) -> Iterator[tuple[str, TensorInfo, int]]:
    """Yield name, description and first byte of every tensor in ``path`` after checking that its bytes are there."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            header_bytes = int.from_bytes(head, "little")
            fits = len(head) == 8 and 2 <= header_bytes <= min(_LONGEST_HEADER_BYTES, file_bytes - 8)
            raw = file.read(header_bytes) if fits else b""
    except OSError as error:
        raise CheckpointError(f"cannot read {path}", have=str(error)) from error
    if not raw:
        raise _damaged(path, f"a file of {format_bytes(file_bytes)} without a whole header")
    data_bytes = file_bytes - 8 - header_bytes
    for name, entry in _parse(path, raw).items():
        if name != "__metadata__":
            info, begin = _checked_entry(path, name, entry, data_bytes)
            yield name, info, 8 + header_bytes + begin


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    """Return the header ``raw`` as a mapping."""
    try:
        header = json.loads(raw.decode("utf-8"))
    except ValueError as error:
        raise _damaged(path, f"a header that is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(path, "a header that is not a mapping")
    return header


def _checked_entry(path: Path, name: str, entry: Any, data_bytes: int) -> tuple[TensorInfo, int]:
    """Return what header ``entry`` says of tensor ``name``, whose bytes must lie within ``data_bytes``."""
    try:
        info = TensorInfo(tuple(int(size) for size in entry["shape"]), str(entry["dtype"]))
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (TypeError, KeyError, ValueError) as error:
        raise _damaged(path, f"an unreadable entry for tensor {name!r}") from error
    if not 0 <= begin <= end or info.nbytes not in (None, end - begin):
        raise _damaged(path, f"{format_bytes(end - begin)} for tensor {name!r}, a {info}")
    if end > data_bytes:
        raise CheckpointError(
            f"{path} is cut off: tensor {name!r} is not whole",
            need=f"{format_bytes(end)} of tensors",
            have=format_bytes(data_bytes),
            remedy=_REMEDY,
        )
    return info, begin


def _damaged(path: Path, have: str) -> CheckpointError:
    """Return the error for a file that does not follow the format."""
    return CheckpointError(f"{path} is not a whole safetensors file", have=have, remedy=_REMEDY)
