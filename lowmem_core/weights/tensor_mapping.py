"""Tensors that are already here: a state dict in memory, or a PyTorch file mapped into memory."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from .tensor_info import TensorInfo, TensorLocation

if TYPE_CHECKING:
    from torch import Tensor

# What an unpickler raises on bytes that are no pickle: whatever the stack machine stumbles over first.
_UNPICKLING_ERRORS = (
    UnpicklingError,
    struct.error,
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
)
_NESTS = ("state_dict", "model_state_dict", "module", "model")


class TensorMapping:
    """The tensors of a mapping; reading one gives the very tensor, not a copy.

    Args:
        tensors: Tensors by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.infos: dict[str, TensorInfo] = {name: TensorInfo.of(tensor) for name, tensor in tensors.items()}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield ``(name, tensor)`` for ``names``, in order."""
        for name in names:
            yield name, self._tensors[name]

    def location(self, name: str) -> TensorLocation | None:
        """Return None: the tensors are in memory, or mapped into it."""
        return None


def read_torch_file(path: Path) -> TensorMapping:
    """Map a file of ``torch.save`` into memory, without running any code in it.

    A state dict nested under ``state_dict``, ``model_state_dict``, ``module`` or ``model`` is unwrapped.

    Raises:
        CheckpointError: The file is damaged, holds code, or holds no state dict.
    """
    import torch

    try:
        is_mappable = zipfile.is_zipfile(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mappable)
    except _UNPICKLING_ERRORS as error:
        raise CheckpointError(
            f"cannot read {path} as a PyTorch weight file",
            have=str(error).partition("\n")[0] or type(error).__name__,
            remedy="Download the file again, or use its .safetensors form.",
        ) from error
    return TensorMapping(checked_tensors(_unwrapped(loaded), str(path)))


def checked_tensors(found: Any, source: str) -> dict[str, Tensor]:
    """Return ``found`` as tensors by name.

    Raises:
        CheckpointError: It is not a mapping from names to tensors, or is empty.
    """
    import torch

    if not isinstance(found, Mapping) or not found:
        raise CheckpointError(f"{source} holds no state dict", have=type(found).__name__)
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{source} holds something else than tensors by name",
                have=f"{type(value).__name__} under {name!r}",
            )
    return dict(found)


def _unwrapped(loaded: Any) -> Any:
    """Return the state dict inside ``loaded``, which trainers like to nest."""
    for nest in _NESTS:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(nest), Mapping):
            return loaded[nest]
    return loaded
