"""Blended tiles, streamed: the pixels of diffusers' ``tiled_decode``, one latent frame at a time.

Tiles overlap and are cross-faded, which leaves soft seams and changes every pixel: exact tiles are better in every
respect but one, agreement with earlier results. This is the explicit choice for those who need that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..place import OffloadMemory
from ..plan.grid import Rect, Span
from .causal import CausalCache, TileWindow
from .decoder_tree import DecoderTree
from .pixels import to_pixels
from .services import DecodeServices
from .stages import FrameBuffer


class BlendedFrameDecoder:
    """All overlapping tiles of one decode, each with its own causal cache.

    Args:
        vae: The VAE, which blends.
        tree: Its decoder.
        overlap_pixels: Side of a tile and distance of two tiles, in pixels.
        has_device_caches: Keep the causal caches on the device.
        services: Surroundings.
    """

    def __init__(
        self,
        vae: nn.Module,
        tree: DecoderTree,
        overlap_pixels: tuple[int, int],
        has_device_caches: bool,
        services: DecodeServices,
    ) -> None:
        self._vae: Any = vae
        self._tree, self._services = tree, services
        self._memory = OffloadMemory(services.devices.compute, services.meter.host_allocation)
        convolutions = tree.spec.convolutions(0, len(tree.spec.layers))
        self._cache = CausalCache(
            self._memory, convolutions, on_device=has_device_caches, is_poisoned=services.is_poisoned
        )
        tile, stride = overlap_pixels
        self._latent_tile, self._latent_stride = tile // tree.spec.scale, stride // tree.spec.scale
        self._stride = stride // tree.spec.patch
        self._overlap = (tile - stride) // tree.spec.patch

    def decode(self, latent: Tensor, index: int, count: int) -> Tensor:
        """Decode the next latent frame ``[1, C, 1, H, W]``, number ``index`` of ``count``."""
        height, width = int(latent.shape[-2]), int(latent.shape[-1])
        source = FrameBuffer(latent.to(self._tree.dtype))
        lefts = range(0, width, self._latent_stride)
        above: list[Tensor] = []
        bands = []
        for number, top in enumerate(range(0, height, self._latent_stride)):
            row: list[Tensor] = []
            for column, left in enumerate(lefts):
                rect = Rect(
                    Span(top, min(height, top + self._latent_tile)),
                    Span(left, min(width, left + self._latent_tile)),
                )
                tile = self._tile(number * len(lefts) + column, source, rect, index == 0)
                if above:
                    tile = self._vae.blend_v(above[column], tile, self._overlap)
                if row:
                    tile = self._vae.blend_h(row[-1], tile, self._overlap)
                row.append(tile)
            bands.append(torch.cat([t[..., : self._stride, : self._stride] for t in row], dim=-1))
            above = row
        scale = self._tree.spec.scale // self._tree.spec.patch
        whole = torch.cat(bands, dim=3)[..., : height * scale, : width * scale]
        self._services.progress.update(index + 1, count, "decode")
        return to_pixels(whole, self._tree.spec.patch)

    def _tile(self, number: int, source: FrameBuffer, rect: Rect, is_first: bool) -> Tensor:
        self._services.interrupt.check()
        own = Rect(Span(0, rect.rows.size), Span(0, rect.cols.size))
        self._cache.begin(number)
        window = TileWindow(self._cache, number, (rect.rows.size, rect.cols.size), own, own)
        state = source.read(rect, self._memory)
        for layer in self._tree.layers:
            layer.run(state, window, is_first)
        self._cache.commit(number)
        with self._services.meter.host_allocation():
            return state.take().to("cpu", copy=True, memory_format=torch.contiguous_format)
