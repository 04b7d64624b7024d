"""Fill a skeleton from a checkpoint, strictly: every tensor by name, shape and dtype, or an error that says which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..weights import Checkpoint, TensorInfo

PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
_LISTED = 4


class TensorReader(Protocol):
    """Reads the tensors of a checkpoint in the form that a module wants."""

    @property
    def forms(self) -> str:
        """What it can read, for an error."""

    def can_read(self, name: str, info: TensorInfo, wanted: Tensor) -> bool:
        """Return whether it can make of tensor ``name`` of the checkpoint what the module has in ``wanted``."""

    def read(self, checkpoint: Checkpoint, names: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
        """Yield ``(name in the module, tensor)`` for ``names``, ``{name in the checkpoint: name in the module}``."""


@dataclass(frozen=True)
class PlainReader:
    """Reads plain floating point tensors.

    Attributes:
        dtype: The dtype to convert to, or None to keep each tensor's own.
    """

    dtype: torch.dtype | None = None

    @property
    def forms(self) -> str:
        """What it can read."""
        return ", ".join(PLAIN_DTYPES)

    def can_read(self, name: str, info: TensorInfo, wanted: Tensor) -> bool:
        """Return whether the tensor is plain."""
        return info.dtype in PLAIN_DTYPES

    def read(self, checkpoint: Checkpoint, names: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors; those of the wanted dtype are not copied."""
        for name, tensor in checkpoint.read_many(names):
            yield names[name], tensor.to(self.dtype)


@dataclass
class _Misfits:
    """What keeps a checkpoint from fitting a module, by kind."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshaped: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("of another shape", self.misshaped),
            ("of a form that cannot be read", self.unreadable),
        )
        return "; ".join(f"{len(names)} {kind}: {_few(names)}" for kind, names in kinds if names)


def assign_tensors(
    module: nn.Module,
    checkpoint: Checkpoint,
    rename: Mapping[str, str] | None = None,
    dtype: torch.dtype | TensorReader | None = None,
) -> None:
    """Replace every parameter and buffer of ``module`` with the tensor that ``checkpoint`` holds for it.

    Tensors that need no conversion are not copied: they share storage with the mapping or map the file.
    On error the module is as before.

    Args:
        module: The module, usually on meta.
        checkpoint: The tensors.
        rename: ``{name in the checkpoint: name in the module}``; None when the names are the same.
        dtype: The dtype to convert plain floats to, or a reader of other forms; None keeps plain floats as they are.

    Raises:
        CheckpointError: Tensors are missing, unexpected, of another shape, or of a form that the reader cannot read;
            or the module has a meta buffer that no state dict holds.
    """
    reader = PlainReader(dtype) if dtype is None or isinstance(dtype, torch.dtype) else dtype
    wanted = module.state_dict(keep_vars=True)
    names = _file_names(checkpoint, wanted, rename)
    misfits = _misfits(checkpoint, wanted, names, rename, reader)
    if str(misfits):
        raise CheckpointError(
            f"{checkpoint.source} does not fit the model",
            need=f"{len(wanted)} tensors in {reader.forms}",
            have=str(misfits),
            remedy="Use a weight file of this model, whole and in a form that can be read.",
        )
    _check_unsaved_buffers(module, wanted)
    for name, tensor in dict(reader.read(checkpoint, names)).items():
        _place(module, name, tensor)


def _file_names(checkpoint: Checkpoint, wanted: Iterable[str], rename: Mapping[str, str] | None) -> dict[str, str]:
    """Return ``{file name: our name}`` of the tensors that have a place in the module."""
    places = set(wanted)
    pairs = ((name, name if rename is None else rename.get(name, "")) for name in checkpoint)
    return {file_name: ours for file_name, ours in pairs if ours in places}


def _misfits(
    checkpoint: Checkpoint,
    wanted: Mapping[str, Tensor],
    names: Mapping[str, str],
    rename: Mapping[str, str] | None,
    reader: TensorReader,
) -> _Misfits:
    """Return what is wrong unless ``names`` covers the module once and every tensor can go in its place."""
    misfits = _Misfits(unexpected=[name for name in checkpoint if name not in names])
    file_names = {ours: file_name for file_name, ours in (rename or {}).items()}
    filled: set[str] = set()
    for file_name, ours in names.items():
        info, shape = checkpoint[file_name], tuple(wanted[ours].shape)
        if ours in filled:
            misfits.unexpected.append(f"{file_name}, a second {ours}")
        filled.add(ours)
        if not reader.can_read(file_name, info, wanted[ours]):
            misfits.unreadable.append(f"{_both(file_name, ours)} is {info.dtype}")
        if shape not in (info.shape, info.unpacked_shape):
            misfits.misshaped.append(f"{_both(file_name, ours)} is {list(info.unpacked_shape)}, not {list(shape)}")
    misfits.missing += [_both(file_names.get(ours, ours), ours) for ours in wanted if ours not in filled]
    return misfits


def _check_unsaved_buffers(module: nn.Module, wanted: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError when ``module`` has meta buffers that would stay empty."""
    left = [name for name, buffer in module.named_buffers() if buffer.is_meta and name not in wanted]
    if left:
        raise CheckpointError(
            f"{type(module).__name__} has buffers that no checkpoint holds",
            have=_few(left),
            remedy="Build them on the CPU before assigning.",
        )


def _place(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Make ``tensor`` the parameter or buffer ``name`` of ``module``; it will want no gradient."""
    parent_name, _, leaf = name.rpartition(".")
    parent = module.get_submodule(parent_name)
    is_parameter = leaf in parent._parameters
    setattr(parent, leaf, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)


def _both(file_name: str, ours: str) -> str:
    """Return the name in the file, followed by ours where it differs."""
    return file_name if file_name == ours else f"{file_name} ({ours})"


def _few(names: list[str]) -> str:
    """Return the first few of ``names``, and how many more there are."""
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
