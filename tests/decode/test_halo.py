"""Halos follow from the module tree, and are as small as they can be: shown by letting NaN flow."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import Tensor

from lowmem_core.decode import DecoderTree, read_decoder
from lowmem_core.decode.layers import Activation
from lowmem_core.tiny.wan_vae import tiny_wan_vae_tensors
from lowmem_core.vae import wan_vae_from_tensors

KEPT = 6


class NoPast:
    """A causal window before the first frame."""

    def load(self, view: Tensor) -> None:
        """Leave zeros."""

    def store(self, view: Tensor) -> None:
        """Forget."""

    def skip(self) -> None:
        """Forget."""


@lru_cache
def tree_of(kind: str) -> DecoderTree:
    """Return a tiny decoder."""
    return read_decoder(wan_vae_from_tensors(tiny_wan_vae_tensors(kind, seed=3)))


def touched(kind: str, start: int, ring: int) -> bool:
    """Return whether NaN ``ring`` positions away from the kept square reaches its pixels, layers from ``start`` on."""
    tree = tree_of(kind)
    layers, spec = tree.layers[start:], tree.spec
    margin = ring + 2
    side = KEPT + 2 * margin
    x = torch.randn(1, spec.layers[start].in_channels, spec.frames_before(start, False), side, side)
    for edge in (slice(0, margin - ring + 1), slice(side - (margin - ring + 1), side)):
        x[..., edge, :] = float("nan")
        x[..., :, edge] = float("nan")
    remembered = spec.skip_before(start)
    skip = None
    if remembered is not None:
        frames = spec.frames_before(remembered, False)
        skip = torch.zeros(1, spec.layers[remembered].in_channels, frames, side, side)
    state = Activation(x, skip)
    with torch.inference_mode():
        for layer in layers:
            layer.run(state, NoPast(), False)
    scale = spec.scale_before(len(spec.layers)) // spec.scale_before(start)
    kept = state.take()[..., margin * scale : (margin + KEPT) * scale, margin * scale : (margin + KEPT) * scale]
    return bool(kept.isnan().any())


def starts(kind: str) -> list[int]:
    """Return the layers after the middle block where a stage may start."""
    spec = tree_of(kind).spec
    return [i for i, layer in enumerate(spec.layers) if layer.enlarge > 1]


@pytest.mark.parametrize("kind", ["2.1", "2.2"])
def test_the_halo_is_enough_and_not_more(kind: str) -> None:
    """NaN in the outermost ring of the halo reaches kept pixels; one position farther out it does not."""
    spec = tree_of(kind).spec
    for start in starts(kind):
        halo = spec.halo(start, len(spec.layers))
        assert touched(kind, start, halo), (start, halo)
        assert not touched(kind, start, halo + 1), (start, halo)
