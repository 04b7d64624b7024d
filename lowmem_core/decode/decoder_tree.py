"""Read a Wan VAE decoder's module tree into layers: what runs, in order, and what the planner must know of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import RequestError
from ..plan.decoder_spec import DecoderSpec, LayerKind, LayerSpec
from .layers import (
    Attention,
    CausalConvolution,
    Head,
    Layer,
    Project,
    Residual,
    SkipAdd,
    SkipSave,
    SpatialUp,
    TimeUp,
)


@dataclass(frozen=True)
class DecoderTree:
    """A decoder ready to run layer by layer.

    Attributes:
        layers: In order of execution; they hold the VAE's own modules.
        spec: The same in plain integers.
        modules: The VAE's own parts that decoding needs on the device; two trees of one VAE hold the same objects,
            which is how ``place.resident`` knows that they share them.
    """

    layers: tuple[Layer, ...]
    spec: DecoderSpec
    modules: tuple[nn.Module, ...]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the decoder's weights."""
        return (parameter for module in self.modules for parameter in module.parameters())

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the decode, which is that of the weights."""
        return next(self.parameters()).dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of the decoder's weights."""
        return sum(p.numel() * p.element_size() for p in self.parameters())


def read_decoder(vae: nn.Module) -> DecoderTree:
    """Return the decoder of ``vae``, a diffusers ``AutoencoderKLWan``, as a list of layers.

    Raises:
        RequestError: The module is not built like a Wan VAE.
    """
    tree: Any = vae
    if not hasattr(vae, "post_quant_conv") or not hasattr(getattr(vae, "decoder", None), "up_blocks"):
        raise RequestError(
            "this VAE cannot be decoded by stages", need="a Wan 2.1 or Wan 2.2 VAE", have=type(vae).__name__
        )
    decoder = tree.decoder
    pairs = [_project(tree.post_quant_conv), _conv(decoder.conv_in)]
    pairs += [_residual(decoder.mid_block.resnets[0])]
    for attention, resnet in zip(decoder.mid_block.attentions, decoder.mid_block.resnets[1:], strict=True):
        pairs += [(Attention(attention), LayerSpec(LayerKind.ATTENTION, attention.dim, attention.dim))]
        pairs += [_residual(resnet)]
    for block in decoder.up_blocks:
        pairs += _up_block(block)
    pairs.append(_head(decoder))
    spec = DecoderSpec(tuple(spec for _, spec in pairs), patch=tree.config.patch_size or 1)
    return DecoderTree(tuple(layer for layer, _ in pairs), spec, (tree.post_quant_conv, decoder))


_Pair = tuple[Layer, LayerSpec]


def _reach(conv: Any) -> int:
    return int(conv.kernel_size[-1] // 2)


def _project(conv: Any) -> _Pair:
    return Project(conv), LayerSpec(LayerKind.PROJECT, conv.in_channels, conv.out_channels)


def _conv(conv: Any) -> _Pair:
    spec = LayerSpec(
        LayerKind.CONV, conv.in_channels, conv.out_channels, _reach(conv), cached_channels=(conv.in_channels,)
    )
    return CausalConvolution(conv), spec


def _residual(block: Any) -> _Pair:
    first, second = block.conv1, block.conv2
    spec = LayerSpec(
        LayerKind.RESIDUAL,
        first.in_channels,
        second.out_channels,
        reach=_reach(first) + _reach(second),
        cached_channels=(first.in_channels, second.in_channels),
        has_shortcut=not isinstance(block.conv_shortcut, nn.Identity),
    )
    return Residual(block), spec


def _up_block(block: Any) -> list[_Pair]:
    upsamplers = getattr(block, "upsamplers", None)
    upsampler = upsamplers[0] if upsamplers else getattr(block, "upsampler", None)
    shortcut = getattr(block, "avg_shortcut", None)
    pairs: list[_Pair] = []
    if shortcut is not None:
        channels = block.resnets[0].conv1.in_channels
        pairs.append((SkipSave(), LayerSpec(LayerKind.SKIP_SAVE, channels, channels)))
    pairs += [_residual(resnet) for resnet in block.resnets]
    if upsampler is not None:
        pairs += _upsampler(upsampler)
    if shortcut is not None:
        channels = pairs[-1][1].out_channels
        pairs.append((SkipAdd(shortcut), LayerSpec(LayerKind.SKIP_ADD, channels, channels)))
    return pairs


def _upsampler(upsampler: Any) -> list[_Pair]:
    pairs: list[_Pair] = []
    if upsampler.mode == "upsample3d":
        channels = upsampler.time_conv.in_channels
        spec = LayerSpec(LayerKind.TIME_UP, channels, channels, repeat=2, cached_channels=(channels,))
        pairs.append((TimeUp(upsampler.time_conv), spec))
    enlarge, conv = upsampler.resample[0], upsampler.resample[1]
    factor = int(enlarge.scale_factor[0])
    spec = LayerSpec(LayerKind.SPATIAL_UP, conv.in_channels, conv.out_channels, _reach(conv), factor)
    pairs.append((SpatialUp(factor, conv), spec))
    return pairs


def _head(decoder: Any) -> _Pair:
    conv = decoder.conv_out
    spec = LayerSpec(
        LayerKind.HEAD, conv.in_channels, conv.out_channels, _reach(conv), cached_channels=(conv.in_channels,)
    )
    return Head(decoder.norm_out, decoder.nonlinearity, conv), spec
