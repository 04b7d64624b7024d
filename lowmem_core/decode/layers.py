"""The decoder's layers, run with few live tensors and the arithmetic of the original, operation for operation.

Two problems shape this file. A causal convolution wants its input padded and preceded by the last two positions in
time; the original makes that by ``cat`` and ``pad``, each a whole copy. Here the padded input is made once and
filled in place. And a norm in half precision passes through float32 copies of the whole tensor; norms look at one
position at a time, so here they run over bands of rows, straight into the padded input. Both keep every bit.

An activation is handed over, not lent: a layer takes it out of ``Activation`` so that it can be freed early.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..plan.activations import CACHE_FRAMES, band_rows


class Activation:
    """The tensor between two layers ``[1, C, F, H, W]``, and the input that a residual up block remembers."""

    def __init__(self, x: Tensor, skip: Tensor | None = None) -> None:
        self._x: Tensor | None = x
        self.skip = skip

    def take(self) -> Tensor:
        """Hand the tensor over; the activation is empty until ``put``."""
        x, self._x = self._x, None
        if x is None:
            raise AssertionError("the activation was taken twice")
        return x

    def put(self, x: Tensor) -> None:
        """Set the tensor."""
        self._x = x


class CausalWindow(Protocol):
    """The causal cache as one pass over a tile sees it: each convolution calls in turn."""

    def load(self, view: Tensor) -> None:
        """Fill ``view``, ``[1, C, 2, H, W]`` and zero, with the last two positions, if there are any."""

    def store(self, view: Tensor) -> None:
        """Remember ``view``, ``[1, C, 2, H, W]``, for the next latent frame, and go to the next convolution."""

    def skip(self) -> None:
        """Go to the next convolution without remembering anything."""


class Layer(Protocol):
    """One step of the decoder."""

    def run(self, state: Activation, causal: CausalWindow, is_first: bool) -> None:
        """Replace the activation in ``state`` by this layer's output."""


Fill = Callable[[Tensor], None]


def _causal_convolution(conv: nn.Conv3d, x: list[Tensor], causal: CausalWindow, fill: Fill | None) -> Tensor:
    """Convolve with the cache in front; ``x`` holds the input alone and is emptied as soon as it is copied."""
    border = conv.kernel_size[-1] // 2
    source = x[0]
    _, channels, frames, height, width = source.shape
    padded = source.new_zeros((1, channels, frames + CACHE_FRAMES, height + 2 * border, width + 2 * border))
    inside = padded[..., border : border + height, border : border + width]
    causal.load(inside[:, :, :CACHE_FRAMES])
    if fill is None:
        inside[:, :, CACHE_FRAMES:].copy_(source)
    else:
        fill(inside[:, :, CACHE_FRAMES:])
    del source
    x.clear()
    causal.store(inside[:, :, -CACHE_FRAMES:])
    del inside
    # The convolution's own forward pads again: the base class takes the padded input as it is.
    return nn.Conv3d.forward(conv, padded)


def _normed(norm: nn.Module, activate: nn.Module, source: Tensor, target: Tensor) -> None:
    """Write ``activate(norm(source))`` into ``target`` in bands of rows."""
    height = source.shape[-2]
    rows = band_rows(source[..., :1, :].numel() * source.element_size(), height)
    for top in range(0, height, rows):
        band = source[..., top : top + rows, :]
        target[..., top : top + rows, :].copy_(activate(norm(band)))


class Project:
    """A 1x1x1 convolution of the latent."""

    def __init__(self, conv: nn.Conv3d) -> None:
        self._conv = conv

    def run(self, state: Activation, causal: CausalWindow, is_first: bool) -> None:
        """Convolve."""
        state.put(nn.Conv3d.forward(self._conv, state.take()))


class CausalConvolution:
    """A causal convolution on its own."""

    def __init__(self, conv: nn.Conv3d) -> None:
        self._conv = conv

    def run(self, state: Activation, causal: CausalWindow, is_first: bool) -> None:
        """Convolve."""
        state.put(_causal_convolution(self._conv, [state.take()], causal, None))


class Residual:
    """Two normed causal convolutions and a shortcut."""

    def __init__(self, block: Any) -> None:
        self._block = block

    def run(self, state: Activation, causal: CausalWindow, is_first: bool) -> None:
        """Add the two convolutions to the shortcut."""
        block = self._block
        x = state.take()
        is_plain = isinstance(block.conv_shortcut, nn.Identity)
        shortcut = x if is_plain else nn.Conv3d.forward(block.conv_shortcut, x)
        held = [x]
        del x
        out = self._half(block.norm1, block.conv1, held, causal)
        held = [out]
        del out
        out = self._half(block.norm2, block.conv2, held, causal)
        state.put(out.add_(shortcut))

    def _half(self, norm: nn.Module, conv: nn.Conv3d, held: list[Tensor], causal: CausalWindow) -> Tensor:
        activate = self._block.nonlinearity
        return _causal_convolution(conv, held, causal, lambda target: _normed(norm, activate, held[0], target))


class Attention:
    """Attention over the whole frame."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block

    def run(self, state: Activation, causal: CausalWindow, is_first: bool) -> None:
        """Attend."""
        state.put(self._block(state.take()))


class SkipSave:
    """Remember the input of a residual up block."""

    def run(self, state: Activation, causal: CausalWindow, is_first: bool) -> None:
        """Remember; nothing later writes into the tensor, so no copy is needed."""
        x = state.take()
        state.skip = x
        state.put(x)


class TimeUp:
    """A causal convolution that makes two frames of each, after the first latent frame."""

    def __init__(self, conv: nn.Conv3d) -> None:
        self._conv = conv

    def run(self, state: Activation, causal: CausalWindow, is_first: bool) -> None:
        """Double the frames."""
        if is_first:
            causal.skip()
            return
        x = state.take()
        _, channels, frames, height, width = x.shape
        held = [x]
        del x
        out = _causal_convolution(self._conv, held, causal, None)
        pairs = out.reshape(1, 2, channels, frames, height, width)
        state.put(torch.stack((pairs[:, 0], pairs[:, 1]), 3).reshape(1, channels, 2 * frames, height, width))


class SpatialUp:
    """Nearest upsampling and a convolution, frame by frame."""

    def __init__(self, factor: int, conv: nn.Module) -> None:
        self._factor = float(factor)
        self._conv = conv

    def run(self, state: Activation, causal: CausalWindow, is_first: bool) -> None:
        """Enlarge; copying values needs no float32 detour."""
        x = state.take()
        _, channels, frames, height, width = x.shape
        images = x.permute(0, 2, 1, 3, 4).reshape(frames, channels, height, width)
        del x
        enlarged = F.interpolate(images, scale_factor=self._factor, mode="nearest-exact")
        del images
        out = self._conv(enlarged)
        state.put(out.view(1, frames, *out.shape[1:]).permute(0, 2, 1, 3, 4))


class SkipAdd:
    """Add the remembered input, enlarged by repeating."""

    def __init__(self, shortcut: Any) -> None:
        self._shortcut = shortcut

    def run(self, state: Activation, causal: CausalWindow, is_first: bool) -> None:
        """Add in bands of rows; the repeated channels never exist as a whole."""
        out, skip = state.take(), state.skip
        if skip is None:
            raise AssertionError("no remembered input to add")
        factor = int(self._shortcut.factor_s)
        row_bytes = factor * out[..., :1, :].numel() * out.element_size()
        rows = band_rows(row_bytes, skip.shape[-2])
        for top in range(0, skip.shape[-2], rows):
            band = self._shortcut(skip[..., top : top + rows, :], first_chunk=is_first)
            out[..., factor * top : factor * (top + rows), :].add_(band)
        state.skip = None
        state.put(out)


class Head:
    """The last norm and convolution."""

    def __init__(self, norm: nn.Module, activate: nn.Module, conv: nn.Conv3d) -> None:
        self._norm, self._activate, self._conv = norm, activate, conv

    def run(self, state: Activation, causal: CausalWindow, is_first: bool) -> None:
        """Make the output channels."""
        held = [state.take()]
        out = _causal_convolution(
            self._conv, held, causal, lambda target: _normed(self._norm, self._activate, held[0], target)
        )
        state.put(out)


__all__ = [
    "Activation",
    "Attention",
    "CausalConvolution",
    "CausalWindow",
    "Head",
    "Layer",
    "Project",
    "Residual",
    "SkipAdd",
    "SkipSave",
    "SpatialUp",
    "TimeUp",
]
