"""Tensors of a file as the module wants them: converted, still encoded, or left on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..weights import Checkpoint, TensorInfo, TensorLocation
from .assign import PLAIN_DTYPES
from .encodings import FP8_DTYPES, Encoding, decoded
from .placeholder import placeholder
from .quantised import QuantisedLinear


@dataclass
class StoredReader:
    """Reads tensors in every stored form, or notes where they are.

    Attributes:
        scales: The checkpoint that holds the scales.
        encodings: How tensors are stored that are not plain.
        targets: What each tensor of the module is to be, by its name there.
        from_disk: Whether to leave on disk what can be read from there later.
        locations: What was left there, by the name in the module.
    """

    scales: Checkpoint
    encodings: Mapping[str, Encoding]
    targets: Mapping[str, torch.dtype]
    from_disk: bool
    locations: dict[str, TensorLocation] = field(default_factory=dict)

    @property
    def forms(self) -> str:
        """What it can read."""
        return "plain floats, fp8 or packed GGUF types"

    def can_read(self, name: str, info: TensorInfo, wanted: Tensor) -> bool:
        """Return whether the tensor is plain, or encoded in a known way."""
        return info.dtype in PLAIN_DTYPES or name in self.encodings

    def read(self, checkpoint: Checkpoint, names: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors, or placeholders for those that are left on disk."""
        present: dict[str, str] = {}
        for name, ours in names.items():
            location = checkpoint.location(name) if self.from_disk and self._is_direct(name, ours) else None
            if location is None:
                present[name] = ours
                continue
            self.locations[ours] = location
            shape = location.shape if self._is_kept(name, ours) else checkpoint[name].unpacked_shape
            yield ours, placeholder(shape, self.targets[ours])
        for name, tensor in checkpoint.read_many(present):
            yield present[name], self._converted(name, present[name], tensor)

    def _is_kept(self, name: str, ours: str) -> bool:
        """Return whether an encoded tensor stays encoded."""
        encoding = self.encodings.get(name)
        return encoding is not None and self.targets[ours] == encoding.storage_dtype

    def _is_direct(self, name: str, ours: str) -> bool:
        """Return whether the bytes of a tensor need at most a change of dtype."""
        encoding = self.encodings.get(name)
        if encoding is None or self._is_kept(name, ours):
            return True
        return encoding.scale_name is None and encoding.kind in FP8_DTYPES

    def _converted(self, name: str, ours: str, tensor: Tensor) -> Tensor:
        """Return the tensor as the module wants it."""
        encoding, target = self.encodings.get(name), self.targets[ours]
        if encoding is None or self._is_kept(name, ours):
            return tensor.to(target)
        scale = None if encoding.scale_name is None else self.scales.read(encoding.scale_name).float()
        return decoded(tensor, encoding, scale, target)


def takes_encoding(module: nn.Module, layer: str, encoding: Encoding) -> bool:
    """Return whether ``layer`` of a skeleton is a linear layer whose weight can stay as it is stored."""
    try:
        found = module.get_submodule(layer)
    except AttributeError:
        return False
    return isinstance(found, nn.Linear) and tuple(found.weight.shape) == encoding.shape


def target_dtypes(module: nn.Module, dtype_of: Callable[[str], torch.dtype]) -> dict[str, torch.dtype]:
    """Return what each tensor of a skeleton is to be: as it is stored where it stays encoded, else by its name."""
    targets = {name: dtype_of(name) for name in module.state_dict()}
    for name, layer in module.named_modules():
        if isinstance(layer, QuantisedLinear):
            targets[f"{name}.weight"] = layer.encoding.storage_dtype
            if layer.scale is not None:
                targets[f"{name}.scale"] = torch.float32
    return targets
