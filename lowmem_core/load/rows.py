"""Some rows of a stored tensor, read from its file and nothing else.

The token table is 2 GiB and a prompt needs a few MiB of it. Mapping the file would do as well, but a map counts as
memory wherever memory is counted, and systems without overcommitment reserve all of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..weights import Checkpoint, TensorLocation
from .encodings import FP8_DTYPES

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "U8": torch.uint8,
    **FP8_DTYPES,
}


def read_rows(checkpoint: Checkpoint, name: str, rows: Tensor) -> Tensor:
    """Return rows of tensor ``name``.

    Args:
        checkpoint: Where it is.
        name: A tensor with a dimension at least.
        rows: int64 ``[N]``, below the length of its first dimension; any order, any repeated.

    Returns:
        ``[N, ...]`` as stored, on the CPU, independent of the file.

    Raises:
        CheckpointError: The file can no longer be read, or ends early.
    """
    location = checkpoint.location(name)
    if location is None or location.dtype not in _DTYPES:
        return _picked(checkpoint.read(name), rows)
    wanted, places = torch.unique(rows, return_inverse=True)
    raw = torch.frombuffer(_read(location, wanted.tolist()), dtype=torch.uint8)
    found = raw.view(len(wanted), -1)[places].contiguous().view(_DTYPES[location.dtype])
    return found.view(len(rows), *location.shape[1:])


def _read(location: TensorLocation, rows: list[int]) -> bytearray:
    """Return the bytes of rows."""
    row_bytes = location.nbytes // location.shape[0]
    result = bytearray()
    try:
        with location.path.open("rb") as file:
            for row in rows:
                file.seek(location.offset + row * row_bytes)
                result += file.read(row_bytes)
    except OSError as error:
        raise CheckpointError(f"cannot read {location.path}", have=str(error)) from error
    if len(result) < len(rows) * row_bytes:
        raise CheckpointError(
            f"{location.path} ended while it was read",
            need=f"{len(rows) * row_bytes} bytes of {len(rows)} rows",
            have=f"{len(result)} bytes",
            remedy="The file changed or was cut off: put it back and run again.",
        )
    return result


def _picked(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return rows of ``tensor``, of any dtype; torch cannot pick rows of fp8."""
    if tensor.element_size() == 1:
        return tensor.view(torch.uint8)[rows].view(tensor.dtype)
    return tensor[rows]
