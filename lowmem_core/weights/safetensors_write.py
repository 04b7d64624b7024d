"""Safetensors files that are whole as soon as they have their name.

A file is written under a temporary name, flushed to the disk and renamed, so a process that is killed leaves either
the former file or the new one.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from ..errors import WriteError

TEMPORARY = ".writing-"
"""What the names of unfinished files begin with."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file, whole or not at all; its folder is made if needed.

    Args:
        path: The file.
        tensors: On any device; they may share memory.
        metadata: Kept in the file beside them.

    Raises:
        WriteError: It cannot be written.
    """
    from safetensors.torch import save_file

    plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    with _replacing(path) as temporary:
        save_file(_unshared(plain), str(temporary), dict(metadata or {}))


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside ``path``, whose file replaces it at the end."""
    from safetensors import SafetensorError

    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(TEMPORARY + uuid.uuid4().hex)
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _flush_folder(path.parent)
    except (OSError, SafetensorError) as error:  # the latter where the disk is full
        raise WriteError(
            f"{path.name} could not be saved",
            need=f"a folder that can be written to, and space in it: {path.parent}",
            have=str(error),
            remedy="Choose another folder or make room.",
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _flush_folder(folder: Path) -> None:
    """Make a rename survive a power cut, where the system can."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors`` with copies of those that share memory with an earlier one, which the format refuses."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return result
