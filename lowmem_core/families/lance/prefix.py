"""Reading a prompt: the keys and values that every step of the image looks back on.

The prompt is read in segments. Those of the conditional and of the unconditional side share the system text; both go
through a layer while its weights are there, so reading takes each weight once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .attention import attend
from .config import LanceConfig
from .rotary import rotation_of, text_positions
from .towers import Tower


class Segment(NamedTuple):
    """Tokens that are read together.

    Attributes:
        embeds: ``[n, D]`` in the dtype of the model.
        first: Position of the first.
        sees: Which segments, by index, come before it.
    """

    embeds: Tensor
    first: int
    sees: tuple[int, ...] = ()


class Prefix(NamedTuple):
    """What an image block looks back on.

    Attributes:
        keys: ``[m, K, d]`` for each layer.
        values: Likewise.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def length(self) -> int:
        """Tokens."""
        return int(self.keys[0].shape[0])


def read_prefixes(
    tower: Tower,
    segments: Sequence[Segment],
    sides: Sequence[Sequence[int]],
    config: LanceConfig,
    poll: Callable[[], None] = lambda: None,
) -> list[Prefix]:
    """Read segments and return the prefix of each side.

    Args:
        tower: The one that understands.
        segments: In an order in which each sees only earlier ones; embeds on the device that computes.
        sides: For each prefix, the indices of its segments in order.
        config: Sizes.
        poll: Called before each layer; may raise to stop.
    """
    dtype, device = segments[0].embeds.dtype, segments[0].embeds.device
    hidden = [segment.embeds for segment in segments]
    rotations = [
        rotation_of(text_positions(segment.first, len(segment.embeds)), config, dtype, device) for segment in segments
    ]
    layers: list[list[tuple[Tensor, Tensor]]] = []
    with torch.no_grad():
        for layer, entry in enumerate(tower.ins):
            poll()
            heads = [entry(states, turn, dtype) for states, turn in zip(hidden, rotations, strict=True)]
            layers.append([(one.key, one.value) for one in heads])
            if layer == len(tower.outs):
                break
            for index, segment in enumerate(segments):
                keys, values = _joined(layers[-1], (*segment.sees, index))
                attended = attend(heads[index].query, keys, values, causal=True)
                hidden[index] = tower.outs[layer](hidden[index], attended)
    return [_prefix(layers, side) for side in sides]


def _prefix(layers: Sequence[Sequence[tuple[Tensor, Tensor]]], side: Sequence[int]) -> Prefix:
    pairs = [_joined(layer, side) for layer in layers]
    return Prefix(tuple(keys for keys, _ in pairs), tuple(values for _, values in pairs))


def _joined(layer: Sequence[tuple[Tensor, Tensor]], indices: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return keys and values of some segments, one after the other."""
    keys, values = zip(*(layer[index] for index in indices), strict=True)
    return torch.cat(keys), torch.cat(values)
