"""Decode a video latent frame by latent frame, stage by stage, tile by tile: the whole clip never exists.

For each latent frame every stage runs over its tiles, from the frame buffer in front of it into the one behind it;
the last one writes pixels into the chunk that is yielded. Nothing stays active across a ``yield``: modes and guards
are entered for each step, so the consumer runs as if there were no decode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from ..frames import FrameChunk
from ..place import OffloadMemory, copy_across, resident
from ..plan.decode_plan import DecodePlan
from ..plan.grid import Rect
from ..plan.stage_search import StagePlan, largest_cost
from .blended import BlendedFrameDecoder
from .causal import CausalCache, crop
from .decoder_tree import DecoderTree, read_decoder
from .latents import latent_shape_of
from .layers import Activation
from .pixels import to_pixels
from .services import DecodeServices
from .stages import FrameBuffer, Pass, StageRunner


def decode_frames(
    latents: Tensor,
    vae: nn.Module,
    plan: DecodePlan,
    services: DecodeServices | None = None,
    *,
    tree: DecoderTree | None = None,
) -> Iterator[FrameChunk]:
    """Decode latents to frames, one latent frame at a time, as ``plan`` says.

    The VAE is used as it is: its flags and its own caches are neither read nor changed, and several decodes, or an
    encode between two chunks, may use it at once. Its weights are on the device until the iterator ends or is closed.

    Args:
        latents: ``[1, C, F, H, W]`` raw VAE latents, or ``[1, C, H, W]`` for one frame; any device and float dtype.
        vae: A diffusers ``AutoencoderKLWan``; its dtype is the dtype of the decode.
        plan: From ``plan_decode`` or ``plan_blended`` for this VAE and this size.
        services: Devices, meter, interrupt and progress; by default the processor alone.
        tree: The decoder of ``vae``, from a caller that has read it and checked the latents to make the plan.

    Yields:
        Chunks ``[F, H, W, 3]``, float32 RGB in 0..1, on the CPU, in order, without overlap.

    Raises:
        RequestError: The latents do not fit the VAE.
        DeviceMemoryError: The device ran out on every rung.
    """
    if tree is None:
        latent_shape_of(latents, vae)
    return _frames(decode_samples(latents, vae, plan, services or DecodeServices(), tree=tree))


def _frames(samples: Iterator[Tensor]) -> Iterator[FrameChunk]:
    """Turn the VAE's output into chunks of frames."""
    first = 0
    for sample in samples:
        with torch.inference_mode():
            frames = sample[0].permute(1, 2, 3, 0).float().add_(1.0).mul_(0.5)
        yield FrameChunk(frames.contiguous(), first)
        first += int(frames.shape[0])


def decode_samples(
    latents: Tensor, vae: nn.Module, plan: DecodePlan, services: DecodeServices, *, tree: DecoderTree | None = None
) -> Iterator[Tensor]:
    """Yield the VAE's own output of each latent frame: ``[1, 3, F, H, W]`` in -1..1, VAE dtype, on the CPU."""
    tree = tree or read_decoder(vae)
    if latents.ndim == 4:
        latents = latents.unsqueeze(2)
    with ExitStack() as stack:
        for module in tree.modules:
            stack.enter_context(resident(module, services.devices.compute))
        services.meter.track(tree.parameters())
        count = int(latents.shape[2])
        decoder: LatentFrameDecoder | BlendedFrameDecoder
        if plan.overlap_pixels is None:
            decoder = LatentFrameDecoder(tree, plan, services)
        else:
            decoder = BlendedFrameDecoder(vae, tree, plan, plan.overlap_pixels, services)
        for index in range(count):
            with services.meter.measuring(), torch.inference_mode():
                sample = decoder.decode(latents[:, :, index : index + 1], index, count)
            yield sample


class LatentFrameDecoder:
    """All stages of one decode, with their causal caches.

    Args:
        tree: The decoder.
        plan: Its stages.
        services: Surroundings.
    """

    def __init__(self, tree: DecoderTree, plan: DecodePlan, services: DecodeServices) -> None:
        self._tree, self._plan, self._services, self._dtype = tree, plan, services, tree.dtype
        self._memory = OffloadMemory(services.devices.compute, services.meter.host_allocation)
        self._runners = [self._runner(stage) for stage in plan.stages]

    def _runner(self, stage: StagePlan) -> StageRunner:
        spec = self._tree.spec
        cache = CausalCache(
            self._memory,
            spec.convolutions(stage.start, stage.stop),
            on_device=self._plan.has_device_caches,
            is_poisoned=self._services.is_poisoned,
        )
        needed = largest_cost(spec, stage, self._dtype.itemsize, is_first=False).peak_bytes
        layers = self._tree.layers[stage.start : stage.stop]
        return StageRunner(stage, layers, cache, self._memory, needed)

    def decode(self, latent: Tensor, index: int, count: int) -> Tensor:
        """Decode the next latent frame ``[1, C, 1, H, W]``, number ``index`` of ``count``."""
        is_first = index == 0
        source = FrameBuffer(self._memory.on_host(tuple(latent.shape), self._dtype))
        source.x.copy_(latent)
        done = index * self._plan.tile_count
        for runner, stage in zip(self._runners, self._plan.stages, strict=True):
            sink = self._sink(stage, is_first)
            for _ in runner.run(Pass(source, sink, is_first), self._services.devices, self._services.interrupt):
                done += 1
                self._services.progress.update(done, count * self._plan.tile_count, "decode")
            source = sink.buffer
        return source.x

    def _sink(self, stage: StagePlan, is_first: bool) -> _BufferSink:
        spec, memory = self._tree.spec, self._memory
        factor = spec.scale_before(stage.stop) // spec.scale_before(stage.start)
        frames = spec.frames_before(stage.stop, is_first)
        height, width = stage.height * factor, stage.width * factor
        channels = spec.channels_before(stage.stop)
        if stage.stop == len(spec.layers):
            patch = spec.patch
            shape = (1, channels // patch**2, frames, height * patch, width * patch)
            return _PixelSink(FrameBuffer(memory.on_host(shape, self._dtype)), factor, patch)
        buffer = FrameBuffer(memory.on_host((1, channels, frames, height, width), self._dtype))
        remembered = spec.skip_before(stage.stop)
        if remembered is not None:
            skip_frames = spec.frames_before(remembered, is_first)
            skip_shape = (1, spec.layers[remembered].in_channels, skip_frames, height, width)
            buffer.skip = memory.on_host(skip_shape, self._dtype)
        return _BufferSink(buffer, factor)


class _BufferSink:
    """Writes a stage's output into the frame buffer of the next stage."""

    def __init__(self, buffer: FrameBuffer, factor: int) -> None:
        self.buffer, self._factor = buffer, factor

    def write(self, kept: Rect, computed: Rect, state: Activation) -> None:
        """Copy the kept part, and the remembered skip at the same place."""
        inside = kept.relative_to(computed).scaled(self._factor)
        target = kept.scaled(self._factor)
        copy_across(crop(self.buffer.x, target), crop(state.take(), inside), wait=True)
        if self.buffer.skip is not None and state.skip is not None:
            copy_across(crop(self.buffer.skip, target), crop(state.skip, inside), wait=True)


class _PixelSink(_BufferSink):
    """Writes the decoder's output as pixels in -1..1."""

    def __init__(self, buffer: FrameBuffer, factor: int, patch: int) -> None:
        super().__init__(buffer, factor)
        self._patch = patch

    def write(self, kept: Rect, computed: Rect, state: Activation) -> None:
        """Unfold patches, clamp, and copy the kept part."""
        inside = kept.relative_to(computed).scaled(self._factor)
        pixels = to_pixels(crop(state.take(), inside), self._patch)
        copy_across(crop(self.buffer.x, kept.scaled(self._factor * self._patch)), pixels, wait=True)
