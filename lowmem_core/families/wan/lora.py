"""LoRAs on Wan transformers while a context lasts: beside the weights, not in them, and gone without a trace.

Linear layers get branches. Norms, modulation tables and the patch embedding, which are small, hold changed values for
the while, and the very same tensors as before afterwards.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ...denoise import LoraUse
from ...errors import RequestError
from ...load.lora_branch import BRANCHES, LoraBranch, branched, takes_branches
from ...load.lora_file import LoraChange, LoraFile, open_lora
from ...place.layout import Entry, set_data
from ...place.sources import DiskSource
from ...place.streamer import _MARK as STREAMED_MARK
from ...weights import TensorLocation, wan_original_name
from ...weights.lora_keys import BIAS, DIFF, DOWN, UP
from .load import LoadedTransformer

APPLIED_MARK = "_lowmem_loras"
_log = logging.getLogger("lowmem")
_PARTS = {DOWN: "down", UP: "up", DIFF: "up", BIAS: "bias"}


@contextmanager
def applied(loaded: LoadedTransformer, uses: Sequence[LoraUse], *, reads: bool = True) -> Iterator[LoadedTransformer]:
    """Apply LoRAs to a transformer while the context lasts; place it within, not around.

    Factors wait where the weights do: in host memory, or in their files. A strength of 0 applies nothing.

    Args:
        loaded: The transformer.
        uses: What to apply, in order; ``model`` does not count.
        reads: Whether to read the factors; without, the transformer is good for counting its bytes and nothing else.

    Yields:
        The same module, with the places of its tensors while the LoRAs are on.

    Raises:
        RequestError: A LoRA does not fit the transformer or cannot be applied, or the transformer is in use.
        CheckpointError: A file is damaged.
    """
    module = loaded.module
    loras = [(_opened(use, module), use.strength) for use in uses]
    active = [(lora, strength) for lora, strength in loras if strength]
    with ExitStack() as stack:
        if not active:
            yield loaded
            return
        _claim(module)
        stack.callback(module.__dict__.pop, APPLIED_MARK)
        with torch.inference_mode(False), torch.no_grad():
            prepared = _Prepared(loaded, reads)
            for lora, strength in active:
                prepared.add(lora, strength)
        layers = [(module.get_submodule(layer), branches) for layer, branches in prepared.branches.items()]
        stack.enter_context(branched(layers))
        stack.enter_context(_holding(module, prepared.values))
        yield replace(loaded, locations=prepared.locations)


@contextmanager
def applied_to_each(
    transformers: Sequence[LoadedTransformer], uses: Sequence[LoraUse], *, reads: bool = True
) -> Iterator[tuple[LoadedTransformer, ...]]:
    """Apply each LoRA to the transformer that it is for, as ``applied`` does.

    Raises:
        RequestError: There is no such transformer; or as ``applied``.
    """
    for use in uses:
        if not 0 <= use.model < len(transformers):
            raise RequestError(
                f"there is no transformer for {use.path.name}",
                need=f"0 to {len(transformers) - 1}",
                have=str(use.model),
            )
    with ExitStack() as stack:
        yield tuple(
            stack.enter_context(applied(loaded, [use for use in uses if use.model == number], reads=reads))
            for number, loaded in enumerate(transformers)
        )


@dataclass
class _Prepared:
    """What is to be put on a transformer, made before anything of it is touched.

    Attributes:
        loaded: The transformer.
        reads: Whether to read values.
        branches: Of each linear layer, in order.
        values: What other tensors are to hold.
        locations: Where tensors are on disk, factors included.
    """

    loaded: LoadedTransformer
    reads: bool
    branches: dict[str, list[LoraBranch]] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    locations: dict[str, TensorLocation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.locations.update(self.loaded.locations)

    def add(self, lora: LoraFile, strength: float) -> None:
        """Take up a LoRA, on top of those before."""
        wanted: dict[str, nn.Parameter] = {}
        for change in lora.changes:
            if takes_branches(_layer(self.loaded.module, change.layer)):
                self._add_branch(lora, change, strength, wanted)
            elif self.reads:
                self._add_values(lora, change, strength)
        if self.reads:
            for key, tensor in lora.checkpoint.read_many(wanted):
                set_data(wanted[key], tensor.to(wanted[key].dtype, copy=True).contiguous())

    def _add_branch(self, lora: LoraFile, change: LoraChange, strength: float, wanted: dict[str, nn.Parameter]) -> None:
        """Make the branches of a layer; what they hold is located, or added to ``wanted``."""
        layer = _layer(self.loaded.module, change.layer)
        for keys in _branch_keys(change):
            shapes = {_PARTS[role]: lora.checkpoint[key].shape for role, key in keys.items()}
            branch = LoraBranch(shapes, _dtype(layer, self.loaded.dtype), change.scale, strength)
            made = self.branches.setdefault(change.layer, [])
            for role, key in keys.items():
                location = lora.checkpoint.location(key) if self.loaded.locations else None
                if location is None:
                    wanted[key] = branch.get_parameter(_PARTS[role])
                else:
                    self.locations[f"{change.layer}.{BRANCHES}.{len(made)}.{_PARTS[role]}"] = location
            made.append(branch)

    def _add_values(self, lora: LoraFile, change: LoraChange, strength: float) -> None:
        """Add to the values of a tensor; they are kept in float32 until the last LoRA."""
        for name, difference in _differences(lora, change, self.loaded.module):
            values = self.values.get(name)
            if values is None:
                values = self._present(name).float()
            self.values[name] = values + strength * difference
            self.locations.pop(name, None)

    def _present(self, name: str) -> Tensor:
        """Return what a tensor of the transformer holds, here or on disk."""
        tensor = self.loaded.module.get_parameter(name)
        location = self.loaded.locations.get(name)
        if location is None:
            return tensor.data
        read = torch.empty(tensor.shape, dtype=tensor.dtype)
        source = DiskSource({name: location}, {})
        try:
            source.write_entry(Entry(name, tensor, 0, tensor.shape, tensor.dtype), read)
        finally:
            source.close()
        return read


def _opened(use: LoraUse, module: nn.Module) -> LoraFile:
    """Open a LoRA, and say what of it does not fit."""
    if not math.isfinite(use.strength):
        raise RequestError(f"{use.path.name} has no strength", need="a finite number", have=str(use.strength))
    lora = open_lora(use.path, module, wan_original_name)
    if lora.left_out:
        _log.warning("%s fits the model in part; left out are %s", lora.checkpoint.source, lora.left_out_text)
    return lora


def _claim(module: nn.Module) -> None:
    """Mark the module as one that has LoRAs on it.

    Raises:
        RequestError: It has some already, or its weights are being streamed.
    """
    if STREAMED_MARK in module.__dict__:
        raise RequestError("the transformer is being streamed", remedy="Apply LoRAs first, and stream within.")
    if module.__dict__.setdefault(APPLIED_MARK, mark := object()) is not mark:
        raise RequestError(
            "the transformer has LoRAs on it already",
            need="one application at a time",
            remedy="Give all LoRAs together, or wait until the other run is over.",
        )


def _branch_keys(change: LoraChange) -> Iterator[Mapping[str, str]]:
    """Yield the keys of each branch of a layer; a product and a whole difference are two, the bias is of the first."""
    product = {role: key for role, key in change.keys.items() if role != DIFF}
    if UP in product or DIFF not in change.keys:
        yield product
        product = {}
    if DIFF in change.keys:
        yield {DIFF: change.keys[DIFF], **product}


def _dtype(layer: nn.Module, dtype: torch.dtype) -> torch.dtype:
    """Return what the factors of a layer are kept in: the dtype of its weight, or where it is packed, of the model."""
    return layer.weight.dtype if isinstance(layer, nn.Linear) else dtype


def _layer(module: nn.Module, name: str) -> nn.Module:
    """Return the layer called ``name``, or the one that a bare tensor of that name belongs to."""
    parent_name, _, leaf = name.rpartition(".")
    parent = module.get_submodule(parent_name)
    return parent if leaf in parent._parameters else module.get_submodule(name)


def _differences(lora: LoraFile, change: LoraChange, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each changed tensor and what is added to it at strength 1, float32."""
    read = {role: lora.checkpoint.read(key).float() for role, key in change.keys.items()}
    layer = _layer(module, change.layer)
    is_bare = change.layer.rpartition(".")[2] in layer._parameters
    if UP in read:
        product = change.scale * (read[UP].flatten(1) @ read[DOWN].flatten(1))
        yield f"{change.layer}.weight", product.view(layer.get_parameter("weight").shape)
    if DIFF in read:
        yield change.layer if is_bare else f"{change.layer}.weight", read[DIFF]
    if BIAS in read:
        yield f"{change.layer}.bias", read[BIAS]


@contextmanager
def _holding(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Let tensors of ``module`` hold other values while the context lasts, in their own dtypes."""
    held = []
    try:
        for name, value in values.items():
            parameter = module.get_parameter(name)
            held.append((parameter, parameter.data))
            with torch.inference_mode(False):
                set_data(parameter, value.to(parameter.dtype))
        yield
    finally:
        for parameter, data in reversed(held):
            set_data(parameter, data)
