"""Blended tiles, streamed: the pixels of diffusers' ``tiled_decode``, one latent frame at a time.

Tiles overlap and are cross-faded, which leaves soft seams and changes every pixel: exact tiles are better in every
respect but one, agreement with earlier results. This is the explicit choice for those who need that.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DeviceMemoryError
from ..place import OffloadMemory
from ..plan.decode_plan import DecodePlan
from ..plan.grid import Rect, Span
from ..units import format_bytes
from .causal import CausalCache, TileWindow
from .decoder_tree import DecoderTree
from .pixels import to_pixels
from .recovery import clear_device, free_words, has_room, survives
from .services import DecodeServices
from .stages import FrameBuffer

_log = logging.getLogger(__name__)


class BlendedFrameDecoder:
    """All overlapping tiles of one decode, each with its own causal cache.

    Args:
        vae: The VAE, which blends.
        tree: Its decoder.
        plan: From ``plan_blended``.
        overlap_pixels: Its side of a tile and distance of two tiles, in pixels.
        services: Surroundings.
    """

    def __init__(
        self,
        vae: nn.Module,
        tree: DecoderTree,
        plan: DecodePlan,
        overlap_pixels: tuple[int, int],
        services: DecodeServices,
    ) -> None:
        self._vae: Any = vae
        self._tree, self._services = tree, services
        self._memory = OffloadMemory(services.devices.compute, services.meter.host_allocation)
        convolutions = tree.spec.convolutions(0, len(tree.spec.layers))
        self._cache = CausalCache(
            self._memory, convolutions, on_device=plan.has_device_caches, is_poisoned=services.is_poisoned
        )
        tile, stride = overlap_pixels
        self._needed_bytes = plan.activation_peak_bytes
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
        """Compute one tile; after an out-of-memory once more, with the device cleared.

        There is no lower rung: in pieces the tile would have other pixels than diffusers' own.

        Raises:
            DeviceMemoryError: It ran out twice.
        """
        self._services.interrupt.check()
        devices, done = self._services.devices, list[Tensor]()
        for is_retry in (False, True):
            if is_retry:
                _log.warning("blended tile %d ran out of device memory: again with the device cleared", number)
                clear_device(devices, self._cache, self._needed_bytes)
            if has_room(devices, self._needed_bytes) and survives(
                lambda: done.append(self._run(number, source, rect, is_first))
            ):
                return done[0]
        raise self._exhausted(number)

    def _run(self, number: int, source: FrameBuffer, rect: Rect, is_first: bool) -> Tensor:
        own = Rect(Span(0, rect.rows.size), Span(0, rect.cols.size))
        self._cache.begin(number)
        window = TileWindow(self._cache, number, (rect.rows.size, rect.cols.size), own, own)
        state = source.read(rect, self._memory)
        for layer in self._tree.layers:
            layer.run(state, window, is_first)
        with self._services.meter.host_allocation():
            tile = state.take().to("cpu", copy=True, memory_format=torch.contiguous_format)
        self._cache.commit(number)
        return tile

    def _exhausted(self, number: int) -> DeviceMemoryError:
        return DeviceMemoryError(
            f"blended tile {number} ran out of device memory twice",
            need=f"about {format_bytes(self._needed_bytes)} for activations",
            have=free_words(self._services.devices),
            remedy='Set tiling to "auto", whose tiles can be cut smaller, or close other programs on the card.',
        )
