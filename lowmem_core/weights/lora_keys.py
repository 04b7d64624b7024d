"""Which layer of a model each tensor of a LoRA file changes, whatever the file calls it.

Trainers spell a key as a prefix, the name of a layer and an ending. Names are original ones or those of diffusers, with
dots or, after ``lora_unet_``, with underscores, from which no dots can be told back. So nothing is parsed: every
spelling of every layer that the model has is looked up, and what is not found is foreign.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from ..errors import CheckpointError

DOWN = "down"
UP = "up"
ALPHA = "alpha"
DIFF = "diff"
BIAS = "bias"
MAGNITUDE = "magnitude"

_PREFIXES = (
    "base_model.",
    "model.",
    "diffusion_model.",
    "transformer.",
    "lora_unet__",
    "lora_unet_",
    "lora_transformer_",
)
_ADAPTER = r"(\.[A-Za-z]\w*)?"
_ENDINGS = {
    DOWN: rf"\.(lora_A|lora_down|lora\.down|lora_linear_layer\.down){_ADAPTER}\.weight",
    UP: rf"\.(lora_B|lora_up|lora\.up|lora_linear_layer\.up){_ADAPTER}\.weight",
    ALPHA: r"\.alpha",
    DIFF: r"\.diff",
    BIAS: rf"\.(diff_b|(lora_B|lora_up){_ADAPTER}\.bias)",
    MAGNITUDE: rf"\.(dora_scale|lora_magnitude_vector{_ADAPTER}(\.weight)?)",
}
_PATTERNS = {role: re.compile(rf"(.+?){ending}\Z") for role, ending in _ENDINGS.items()}
_MODULATION_DIFF = ".diff_m"


class LoraKeys(NamedTuple):
    """The keys of a LoRA file, sorted by what they change.

    Attributes:
        layers: By our name of a layer or of a bare tensor: the key of each role, such as ``DOWN``.
        foreign: Keys that name nothing the model has, or that say nothing we know.
    """

    layers: Mapping[str, Mapping[str, str]]
    foreign: tuple[str, ...]


def match_lora_keys(keys: Iterable[str], layers: Iterable[str], original_name: Callable[[str], str]) -> LoraKeys:
    """Find the layer of each key.

    Args:
        keys: Of the file.
        layers: Our names of the model's layers and bare tensors.
        original_name: Gives the original name of a layer.

    Raises:
        CheckpointError: Two keys say the same of one layer.
    """
    known = _spellings(layers, original_name)
    found: dict[str, dict[str, str]] = {}
    foreign = []
    for key in keys:
        named, role = _named(key)
        layer = known.get(_bare(named))
        if layer is None:
            foreign.append(key)
            continue
        roles = found.setdefault(layer, {})
        if role in roles:
            raise CheckpointError(
                "a LoRA file changes one layer twice",
                have=f"{roles[role]!r} and {key!r}, both for {layer}",
                remedy="Save the LoRA again, in one naming.",
            )
        roles[role] = key
    return LoraKeys(found, tuple(foreign))


def _spellings(layers: Iterable[str], original_name: Callable[[str], str]) -> dict[str, str]:
    """Return our name of each layer by everything a file may call it."""
    known: dict[str, str] = {}
    for layer in layers:
        original = original_name(layer)
        for name in (layer, original, layer.replace(".", "_"), original.replace(".", "_")):
            known[name] = layer
    return known


def _named(key: str) -> tuple[str, str]:
    """Return what ``key`` calls the layer, and the role; two empty words if its ending says nothing we know."""
    if key.endswith(_MODULATION_DIFF):
        return key.removesuffix(_MODULATION_DIFF) + ".modulation", DIFF
    for role, pattern in _PATTERNS.items():
        match = pattern.match(key)
        if match is not None:
            return match[1], role
    return "", ""


def _bare(name: str) -> str:
    """Return ``name`` without prefixes, of which there may be several."""
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
    return name if prefix is None else _bare(name.removeprefix(prefix))
