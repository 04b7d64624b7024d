"""How the tensors of one unit of weights lie side by side in one allocation, so that a block is one copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..plan.stream_plan import WeightInventory

ALIGNMENT = 512


@dataclass(frozen=True)
class Entry:
    """One parameter or buffer of a unit.

    Attributes:
        name: Its name in the whole module.
        tensor: The parameter or buffer itself.
        offset: Where its bytes begin in the unit's allocation.
        shape: Its shape.
        dtype: Its dtype.
    """

    name: str
    tensor: Tensor
    offset: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def view(self, slab: Tensor, base: int = 0) -> Tensor:
        """Return its place in ``slab``, uint8 ``[bytes]``, where the unit begins at ``base``."""
        start = base + self.offset
        return slab[start : start + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Unit:
    """The root or one block of a module: tensors that arrive together.

    Attributes:
        entries: The tensors, each once.
        nbytes: Bytes of an allocation that holds them all.
    """

    entries: tuple[Entry, ...]
    nbytes: int


def units_of(module: nn.Module, blocks: Sequence[nn.Module]) -> tuple[Unit, tuple[Unit, ...]]:
    """Return the root of ``module`` and its ``blocks``, each as a unit; a tensor in two of them belongs to the root."""
    names = _names(module)
    owned = [list(_tensors(block)) for block in blocks]
    seen: dict[int, int] = {}
    for tensors in owned:
        for tensor in tensors:
            seen[id(tensor)] = seen.get(id(tensor), 0) + 1
    root = [tensor for tensor in _tensors(module) if seen.get(id(tensor), 0) != 1]
    block_units = (_unit((t for t in tensors if seen[id(t)] == 1), names) for tensors in owned)
    return _unit(root, names), tuple(block_units)


def inventory_of(module: nn.Module, blocks: Sequence[nn.Module]) -> WeightInventory:
    """Return the bytes of ``module`` and its ``blocks`` as they would lie on a device."""
    root, units = units_of(module, blocks)
    return WeightInventory(root.nbytes, tuple(unit.nbytes for unit in units))


def set_data(tensor: Tensor, data: Tensor) -> None:
    """Point ``tensor`` at the storage of ``data``, without rebinding it, also when both are simulated."""
    tensor.data = data
    if isinstance(tensor, FakeTensor):
        tensor.fake_device = data.device


def _names(module: nn.Module) -> dict[int, str]:
    pairs = [*module.named_parameters(), *module.named_buffers()]
    return {id(tensor): name for name, tensor in pairs}


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield each parameter and buffer once."""
    yield from module.parameters()
    yield from module.buffers()


def _unit(tensors: Iterable[Tensor], names: dict[int, str]) -> Unit:
    entries, offset = [], 0
    for tensor in tensors:
        entry = Entry(names[id(tensor)], tensor, offset, tensor.shape, tensor.dtype)
        entries.append(entry)
        offset += -(-entry.nbytes // ALIGNMENT) * ALIGNMENT
    return Unit(tuple(entries), offset)
