"""Fill a skeleton from a checkpoint, strictly: every tensor by name, shape and dtype, or an error that says which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ..errors import CheckpointError
from ..weights import Checkpoint

PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
_LISTED = 4


@dataclass
class _Misfits:
    """What keeps a checkpoint from fitting a module, by kind."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshaped: list[str] = field(default_factory=list)
    quantised: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("of another shape", self.misshaped),
            ("not plain floating point", self.quantised),
        )
        return "; ".join(f"{len(names)} {kind}: {_few(names)}" for kind, names in kinds if names)


def assign_tensors(
    module: nn.Module,
    checkpoint: Checkpoint,
    rename: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Replace every parameter and buffer of ``module`` with the tensor that ``checkpoint`` holds for it.

    Tensors that already have ``dtype`` are not copied: they share storage with the mapping or map the file.
    On error the module is as before.

    Args:
        module: The module, usually on meta.
        checkpoint: The tensors.
        rename: ``{name in the checkpoint: name in the module}``; None when the names are the same.
        dtype: The dtype to convert to, or None to keep each tensor's own.

    Raises:
        CheckpointError: Tensors are missing, unexpected, of another shape, or of an integer or fp8 dtype;
            or the module has a meta buffer that no state dict holds.
    """
    wanted = module.state_dict(keep_vars=True)
    names = _file_names(checkpoint, wanted, rename)
    _check_fit(checkpoint, wanted, names, rename)
    _check_unsaved_buffers(module, wanted)
    filled = {names[file_name]: tensor.to(dtype) for file_name, tensor in checkpoint.read_many(names)}
    for name, tensor in filled.items():
        _place(module, name, tensor)


def _file_names(checkpoint: Checkpoint, wanted: Iterable[str], rename: Mapping[str, str] | None) -> dict[str, str]:
    """Return ``{file name: our name}`` of the tensors that have a place in the module."""
    places = set(wanted)
    pairs = ((name, name if rename is None else rename.get(name, "")) for name in checkpoint)
    return {file_name: ours for file_name, ours in pairs if ours in places}


def _check_fit(
    checkpoint: Checkpoint,
    wanted: Mapping[str, torch.Tensor],
    names: Mapping[str, str],
    rename: Mapping[str, str] | None,
) -> None:
    """Raise CheckpointError unless ``names`` covers the module once and every tensor can go in its place."""
    misfits = _Misfits(unexpected=[name for name in checkpoint if name not in names])
    file_names = {ours: file_name for file_name, ours in (rename or {}).items()}
    filled: set[str] = set()
    for file_name, ours in names.items():
        info = checkpoint[file_name]
        if ours in filled:
            misfits.unexpected.append(f"{file_name}, a second {ours}")
        filled.add(ours)
        if info.dtype not in PLAIN_DTYPES:
            misfits.quantised.append(f"{_both(file_name, ours)} is {info.dtype}")
        if info.shape != tuple(wanted[ours].shape):
            need = list(wanted[ours].shape)
            misfits.misshaped.append(f"{_both(file_name, ours)} is {list(info.shape)}, not {need}")
    misfits.missing += [_both(file_names.get(ours, ours), ours) for ours in wanted if ours not in filled]
    if str(misfits):
        raise CheckpointError(
            f"{checkpoint.source} does not fit the model",
            need=f"{len(wanted)} tensors in {', '.join(PLAIN_DTYPES)}",
            have=str(misfits),
            remedy="Use a plain (not quantised) weight file of this model.",
        )


def _check_unsaved_buffers(module: nn.Module, wanted: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError when ``module`` has meta buffers that would stay empty."""
    left = [name for name, buffer in module.named_buffers() if buffer.is_meta and name not in wanted]
    if left:
        raise CheckpointError(
            f"{type(module).__name__} has buffers that no checkpoint holds",
            have=_few(left),
            remedy="Build them on the CPU before assigning.",
        )


def _place(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
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
