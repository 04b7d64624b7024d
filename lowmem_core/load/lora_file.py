"""A LoRA file, checked against a model before anything of it is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from torch import nn

from ..errors import CheckpointError, RequestError
from ..weights import Checkpoint, TensorInfo
from ..weights.lora_keys import ALPHA, BIAS, DIFF, DOWN, MAGNITUDE, UP, match_lora_keys
from .assign import PLAIN_DTYPES, _few
from .encodings import FP8_DTYPES
from .lora_branch import linear_shape, takes_branches

_LISTED = 4
_CONVOLUTION_DIMS = 5


@dataclass(frozen=True)
class LoraChange:
    """What a LoRA does to one layer.

    Attributes:
        layer: Our name of the layer, or of a bare tensor.
        keys: The file's key of each part: ``DOWN`` and ``UP``, ``DIFF``, ``BIAS``.
        scale: Alpha over rank; 1 where the file has no alpha.
    """

    layer: str
    keys: Mapping[str, str]
    scale: float


@dataclass(frozen=True)
class LoraFile:
    """A LoRA that fits a model, in whole or in part.

    Attributes:
        checkpoint: Its tensors.
        changes: What it does, layer by layer.
        left_out: Keys that name nothing in the model.
    """

    checkpoint: Checkpoint
    changes: tuple[LoraChange, ...]
    left_out: tuple[str, ...]

    @property
    def left_out_text(self) -> str:
        """How many keys are left out, and the first few of them."""
        return f"{len(self.left_out)} of {len(self.checkpoint)} keys: {_few(list(self.left_out))}"


class _Place(NamedTuple):
    """What a LoRA can change: the weight of a layer and perhaps its bias, or a bare tensor."""

    shape: tuple[int, ...]
    is_layer: bool
    takes_bias: bool


@dataclass
class _Sorted:
    """The parts of a file: what fits, what is left out, and what has another shape."""

    layers: dict[str, dict[str, str]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    misshaped: list[str] = field(default_factory=list)


def open_lora(path: Path, module: nn.Module, original_name: Callable[[str], str]) -> LoraFile:
    """Find out what the LoRA at ``path`` does to ``module``; but for alphas nothing is read.

    Weights of a convolution that differ in input channels only are left out: a LoRA of a text-to-video model is meant
    for image-to-video models too.

    Args:
        path: The file, with keys in any known naming.
        module: The model, also without its weights.
        original_name: Gives the original name of a layer.

    Raises:
        CheckpointError: The file is damaged or incomplete.
        RequestError: It fits no layer of the model, was made for another size, or is of a kind we cannot apply.
    """
    checkpoint = Checkpoint.open(path)
    places = dict(_places(module))
    keys = match_lora_keys(checkpoint, places, original_name)
    found = _Sorted(left_out=list(keys.foreign))
    for layer, roles in keys.layers.items():
        _check_whole(checkpoint, roles)
        _sort(checkpoint, layer, roles, places[layer], found)
    if found.misshaped:
        raise RequestError(
            f"{checkpoint.source} was made for a model of another size",
            need="factors in the shapes of this model",
            have=_few(found.misshaped),
            remedy="Use a LoRA of this very model: those of Wan 1.3B, 5B and 14B do not fit each other.",
        )
    if not found.layers:
        linear = [original_name(layer) for layer, place in places.items() if len(place.shape) == 2]
        samples = linear[:: max(1, len(linear) // _LISTED)]
        raise RequestError(
            f"{checkpoint.source} matches nothing in the model",
            need=f"LoRA keys for layers such as {', '.join(samples)}, bare or after a known prefix",
            have=f"{len(checkpoint)} keys: {_few(list(checkpoint))}",
            remedy="Use a LoRA that was trained for this kind of model.",
        )
    return LoraFile(checkpoint, tuple(_changes(checkpoint, found.layers)), tuple(found.left_out))


def _places(module: nn.Module) -> Iterator[tuple[str, _Place]]:
    """Yield everything that a LoRA can change, by name."""
    for name, layer in module.named_modules():
        own = {leaf: tensor for leaf, tensor in layer._parameters.items() if tensor is not None}
        if takes_branches(layer):
            yield name, _Place(linear_shape(layer), is_layer=True, takes_bias=True)
            continue
        if "weight" in own:
            yield name, _Place(tuple(own["weight"].shape), is_layer=True, takes_bias="bias" in own)
        for leaf in own.keys() - {"weight", "bias"}:
            bare = f"{name}.{leaf}".removeprefix(".")
            yield bare, _Place(tuple(own[leaf].shape), is_layer=False, takes_bias=False)


def _check_whole(checkpoint: Checkpoint, roles: Mapping[str, str]) -> None:
    """Raise unless every part of a change is there, and of a kind we can apply."""
    if MAGNITUDE in roles:
        raise RequestError(
            f"{checkpoint.source} is a DoRA, which is not supported",
            need="a LoRA: factors, and perhaps differences",
            have=repr(roles[MAGNITUDE]),
            remedy="Merge it into the model's weights, or use a LoRA; without its magnitudes it would be wrong.",
        )
    if (DOWN in roles) != (UP in roles):
        raise CheckpointError(
            f"{checkpoint.source} holds one half of a product",
            need="both factors of each layer",
            have=repr(roles.get(DOWN) or roles.get(UP)),
            remedy="Download the file again.",
        )
    for role, key in roles.items():
        if checkpoint[key].dtype not in (*PLAIN_DTYPES, *FP8_DTYPES) and role != ALPHA:
            raise CheckpointError(
                f"{checkpoint.source} stores {key!r} in a way we cannot read",
                need="floats",
                have=str(checkpoint[key]),
            )


def _sort(checkpoint: Checkpoint, layer: str, roles: Mapping[str, str], place: _Place, found: _Sorted) -> None:
    """Put each part of a change where it belongs."""
    fitting = {}
    for role, key in roles.items():
        if not _has_place(role, roles, checkpoint, place):
            found.left_out.append(key)
        elif not _fits(role, roles, checkpoint, place.shape):
            found.misshaped.append(f"{key} {list(checkpoint[key].shape)} for {list(place.shape)}")
        else:
            fitting[role] = key
    if fitting:
        found.layers[layer] = fitting


def _has_place(role: str, roles: Mapping[str, str], checkpoint: Checkpoint, place: _Place) -> bool:
    """Return whether the model has what this part changes."""
    if role == BIAS:
        return place.takes_bias
    if role == DIFF:
        return not _has_other_inputs(checkpoint[roles[DIFF]], place.shape)
    if DOWN not in roles:  # an alpha alone
        return False
    return place.is_layer and len(place.shape) > 1 and not _has_other_inputs(checkpoint[roles[DOWN]], place.shape)


def _has_other_inputs(info: TensorInfo, shape: tuple[int, ...]) -> bool:
    """Return whether a part for a convolution differs from it in input channels, and in nothing else."""
    if len(shape) != _CONVOLUTION_DIMS or len(info.shape) != _CONVOLUTION_DIMS:
        return False
    return info.shape[1] != shape[1] and info.shape[2:] == shape[2:]


def _fits(role: str, roles: Mapping[str, str], checkpoint: Checkpoint, shape: tuple[int, ...]) -> bool:
    """Return whether a part has the shape that belongs to a weight of ``shape``."""
    found = checkpoint[roles[role]].shape
    if role == ALPHA:
        return math.prod(found) == 1
    if role == BIAS:
        return found == shape[:1]
    if role == DIFF:
        return found == shape
    if role == DOWN:
        return found[:1] > (0,) and found[1:] == shape[1:]
    rank = checkpoint[roles[DOWN]].shape[:1]
    return found == shape[:1] + rank + (1,) * (len(shape) - 2)


def _changes(checkpoint: Checkpoint, layers: Mapping[str, Mapping[str, str]]) -> Iterator[LoraChange]:
    """Yield the changes, with their alphas."""
    alphas = {
        key: tensor.item() for key, tensor in checkpoint.read_many(r[ALPHA] for r in layers.values() if ALPHA in r)
    }
    for layer, roles in layers.items():
        scale = 1.0
        if ALPHA in roles:
            scale = alphas[roles[ALPHA]] / checkpoint[roles[DOWN]].shape[0]
            if not math.isfinite(scale):
                raise CheckpointError(f"{checkpoint.source} has an alpha that is no number", have=repr(roles[ALPHA]))
        yield LoraChange(layer, {role: key for role, key in roles.items() if role != ALPHA}, scale)
