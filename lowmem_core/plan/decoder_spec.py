"""A causal VAE decoder as a list of layers in plain integers.

The list is read from a module tree by ``decode.decoder_tree``; halos follow from it, they are never written down.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class LayerKind(Enum):
    """What a decoder layer does."""

    PROJECT = "project"  # 1x1x1 convolution of the latent
    CONV = "conv"  # causal convolution
    RESIDUAL = "residual"  # two normed causal convolutions and a shortcut
    ATTENTION = "attention"  # over the whole frame: cannot be tiled
    SKIP_SAVE = "skip_save"  # remember the input of a residual up block
    TIME_UP = "time_up"  # causal convolution that doubles the frames
    SPATIAL_UP = "spatial_up"  # nearest upsampling and a convolution
    SKIP_ADD = "skip_add"  # add the enlarged remembered input
    HEAD = "head"  # norm and the last causal convolution


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer.

    Attributes:
        kind: What it does.
        in_channels: Channels of its input.
        out_channels: Channels of its output.
        reach: How far a kept output position looks sideways, in positions of the output.
        enlarge: Factor on height and width.
        repeat: Factor on frames, after the first latent frame.
        cached_channels: Channels of each causal convolution input remembered over time.
        has_shortcut: The residual shortcut is a convolution.
    """

    kind: LayerKind
    in_channels: int
    out_channels: int
    reach: int = 0
    enlarge: int = 1
    repeat: int = 1
    cached_channels: tuple[int, ...] = ()
    has_shortcut: bool = False


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder: its layers, and how the last layer's channels become pixels.

    Attributes:
        layers: In order of execution.
        patch: Each output position holds ``patch`` x ``patch`` pixels.
    """

    layers: tuple[LayerSpec, ...]
    patch: int = 1

    @property
    def latent_channels(self) -> int:
        """Channels of the latent."""
        return self.layers[0].in_channels

    @property
    def scale(self) -> int:
        """Pixels per latent position, along each side."""
        return self.scale_before(len(self.layers)) * self.patch

    def scale_before(self, index: int) -> int:
        """Return positions per latent position at the input of layer ``index``."""
        scale = 1
        for layer in self.layers[:index]:
            scale *= layer.enlarge
        return scale

    def frames_before(self, index: int, is_first: bool) -> int:
        """Return the frames at the input of layer ``index`` for the first or a later latent frame."""
        frames = 1
        for layer in self.layers[:index]:
            frames *= 1 if is_first else layer.repeat
        return frames

    def channels_before(self, index: int) -> int:
        """Return the channels at the input of layer ``index``."""
        return self.layers[index].in_channels if index < len(self.layers) else self.layers[-1].out_channels

    def skip_before(self, index: int) -> int | None:
        """Return the layer whose input is still remembered when layer ``index`` starts, or None."""
        open_skip = None
        for position, layer in enumerate(self.layers[:index]):
            if layer.kind is LayerKind.SKIP_SAVE:
                open_skip = position
            elif layer.kind is LayerKind.SKIP_ADD:
                open_skip = None
        return open_skip

    def convolutions(self, start: int, stop: int) -> int:
        """Return the causal convolutions in the layers ``start..stop``."""
        return sum(len(layer.cached_channels) for layer in self.layers[start:stop])

    def is_global(self, start: int, stop: int) -> bool:
        """Return whether the layers ``start..stop`` look at the whole frame."""
        return any(layer.kind is LayerKind.ATTENTION for layer in self.layers[start:stop])

    def halo(self, start: int, stop: int) -> int:
        """Return the halo of the layers ``start..stop``, in positions of the input of ``start``."""
        halo = 0
        for layer in reversed(self.layers[start:stop]):
            halo = -(-(halo + layer.reach) // layer.enlarge)
        return halo
