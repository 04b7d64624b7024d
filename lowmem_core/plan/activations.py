"""Closed forms: bytes live on the device while a decoder layer runs, and its multiply-adds.

They mirror ``decode.layers`` line by line; a test holds them against the simulated real code.
"""

from __future__ import annotations

from typing import NamedTuple

from .decoder_spec import DecoderSpec, LayerKind, LayerSpec

CACHE_FRAMES = 2
BAND_BYTES = 4 * 1024 * 1024
STAGING_BYTES = 8 * 1024 * 1024


class Block(NamedTuple):
    """Size of a tensor without its channels."""

    frames: int
    height: int
    width: int
    element_bytes: int

    def nbytes(self, channels: int) -> int:
        """Return the bytes of ``channels`` channels."""
        return channels * self.frames * self.height * self.width * self.element_bytes

    def padded_bytes(self, channels: int, border: int) -> int:
        """Return the bytes of the padded input of a causal convolution."""
        padded = (self.height + 2 * border) * (self.width + 2 * border)
        return channels * (self.frames + CACHE_FRAMES) * padded * self.element_bytes

    def band_bytes(self, channels: int) -> int:
        """Return the temporary bytes of one band of norm and activation."""
        row = channels * self.frames * self.width * self.element_bytes
        band = row * band_rows(row, self.height)
        return band * (5 if self.element_bytes == 2 else 3)

    def grown(self, layer: LayerSpec, is_first: bool) -> Block:
        """Return the size after ``layer``."""
        frames = self.frames if is_first else self.frames * layer.repeat
        return Block(frames, self.height * layer.enlarge, self.width * layer.enlarge, self.element_bytes)


def band_rows(row_bytes: int, height: int) -> int:
    """Return how many rows of ``row_bytes`` each make one band."""
    return max(1, min(height, BAND_BYTES // max(1, row_bytes)))


def layer_peak_bytes(layer: LayerSpec, block: Block, is_first: bool) -> int:
    """Return the bytes alive at the worst moment of ``layer``, its input included.

    Args:
        layer: The layer.
        block: Size of its input.
        is_first: The first latent frame, whose frames are not doubled.
    """
    x = block.nbytes(layer.in_channels)
    after = block.grown(layer, is_first)
    out = after.nbytes(layer.out_channels)
    if layer.kind is LayerKind.RESIDUAL:
        return _residual_peak(layer, block)
    if layer.kind is LayerKind.ATTENTION:
        return 8 * x + 2 * block.frames * block.height * block.width * 4
    if layer.kind is LayerKind.TIME_UP:
        if is_first:
            return x
        padded = block.padded_bytes(layer.in_channels, 0)
        return max(x + padded + _staging(block, layer.in_channels), padded + out, 2 * out)
    if layer.kind is LayerKind.SPATIAL_UP:
        enlarged = after.nbytes(layer.in_channels)
        return max(2 * x, x + enlarged, enlarged + out)
    if layer.kind is LayerKind.SKIP_ADD:
        return out + 3 * min(out, BAND_BYTES)
    if layer.kind is LayerKind.SKIP_SAVE:
        return x
    border = 1 if layer.reach else 0
    padded = block.padded_bytes(layer.in_channels, border) if layer.cached_channels else 0
    band = block.band_bytes(layer.in_channels) if layer.kind is LayerKind.HEAD else 0
    return max(x + padded + max(band, _staging(block, layer.in_channels)), max(x, padded) + out)


def _staging(block: Block, channels: int) -> int:
    cache = channels * CACHE_FRAMES * block.height * block.width * block.element_bytes
    return min(cache, STAGING_BYTES)


def _residual_peak(layer: LayerSpec, block: Block) -> int:
    x, out = block.nbytes(layer.in_channels), block.nbytes(layer.out_channels)
    held = out if layer.has_shortcut else x
    first = block.padded_bytes(layer.in_channels, 1)
    second = block.padded_bytes(layer.out_channels, 1)
    band_in = max(block.band_bytes(layer.in_channels), _staging(block, layer.in_channels))
    band_out = max(block.band_bytes(layer.out_channels), _staging(block, layer.out_channels))
    return max(
        x + (out if layer.has_shortcut else 0) + first + band_in,
        held + first + out,
        held + out + second + band_out,
        held + second + out,
    )


def layer_multiply_adds(layer: LayerSpec, block: Block, is_first: bool) -> int:
    """Return the multiply-adds of ``layer`` on an input of size ``block``."""
    positions = block.frames * block.height * block.width
    pair = layer.in_channels * layer.out_channels
    if layer.kind is LayerKind.RESIDUAL:
        square = layer.out_channels * layer.out_channels
        return positions * (27 * (pair + square) + (pair if layer.has_shortcut else 0))
    if layer.kind is LayerKind.TIME_UP:
        return 0 if is_first else positions * 3 * layer.in_channels * 2 * layer.out_channels
    if layer.kind is LayerKind.SPATIAL_UP:
        return positions * layer.enlarge**2 * 9 * pair
    if layer.kind is LayerKind.ATTENTION:
        area = block.height * block.width
        return positions * (4 * pair + 2 * area * layer.in_channels)
    if layer.kind in (LayerKind.SKIP_SAVE, LayerKind.SKIP_ADD):
        return 0
    return positions * pair * (27 if layer.cached_channels else 1)


class StageCost(NamedTuple):
    """What one tile of a stage takes."""

    peak_bytes: int
    cache_bytes: int
    multiply_adds: int


def stage_cost(spec: DecoderSpec, start: int, stop: int, block: Block, is_first: bool) -> StageCost:
    """Return the cost of running layers ``start..stop`` on one tile of size ``block``."""
    peak = cache = work = 0
    skip = skip_bytes(spec, start, block, is_first)
    is_alias = False
    for layer in spec.layers[start:stop]:
        beside = 0 if is_alias and not layer.has_shortcut else skip
        peak = max(peak, layer_peak_bytes(layer, block, is_first) + beside)
        is_alias = layer.kind is LayerKind.SKIP_SAVE
        if is_alias:
            skip = block.nbytes(layer.in_channels)
        work += layer_multiply_adds(layer, block, is_first)
        area = block.height * block.width * block.element_bytes
        cache += CACHE_FRAMES * area * sum(layer.cached_channels)
        if layer.kind is LayerKind.SKIP_ADD:
            skip = 0
        block = block.grown(layer, is_first)
    return StageCost(peak, cache, work)


def skip_bytes(spec: DecoderSpec, index: int, block: Block, is_first: bool) -> int:
    """Return the bytes of the skip that is remembered when layer ``index`` starts on ``block``."""
    source = spec.skip_before(index)
    if source is None:
        return 0
    shrink = spec.scale_before(index) // spec.scale_before(source)
    frames = spec.frames_before(source, is_first)
    area = (block.height // shrink) * (block.width // shrink)
    return spec.layers[source].in_channels * frames * area * block.element_bytes
