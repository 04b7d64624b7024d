"""A decode from the request to the finished file, under a budget."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from ..frames import FrameChunk, FrameHasher
from ..host import Host
from ..memory import MemoryBudget, MemoryReport, PhaseReport
from ..plan import DecodePlan, plan_blended, plan_decode
from ..units import format_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ..decode import DecoderTree
    from ..memory import MemoryMeter
    from ..shapes import LatentShape
    from ..write import VideoSettings

BLENDED = "blended"


@dataclass(frozen=True)
class DecodeRequest:
    """A decode to a video file.

    Attributes:
        latents: ``[1, C, F, H, W]`` raw VAE latents, or ``[1, C, H, W]``.
        vae: A diffusers ``AutoencoderKLWan``; its dtype is the dtype of the decode.
        path: The file to write.
        video: How to write it.
        tiling: ``auto`` (exact tiles), ``off``, ``blended``, or the side of an exact tile in pixels.
        budget: Limits; the device limit holds for weights, activations and caches together.
    """

    latents: Tensor
    vae: nn.Module
    path: Path
    video: VideoSettings
    tiling: str | int = "auto"
    budget: MemoryBudget = field(default_factory=MemoryBudget)


@dataclass(frozen=True)
class DecodeReport:
    """What a decode did.

    Attributes:
        path: The finished file.
        frames: Frames in it.
        height: Pixels.
        width: Pixels.
        plan: The plan that was followed.
        memory: Planned and measured bytes.
        decode_s: Seconds spent decoding.
        total_s: Seconds from the plan to the finished file.
        rgb_sha256: SHA-256 of the uint8 RGB frames in order.
    """

    path: Path
    frames: int
    height: int
    width: int
    plan: DecodePlan
    memory: MemoryReport
    decode_s: float
    total_s: float
    rgb_sha256: str

    @property
    def exactness(self) -> str:
        """``exact``, ``within one level`` or ``blended``."""
        if self.plan.tiling == BLENDED:
            return BLENDED
        return "exact" if self.plan.is_canonical else "within one level"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {
            "frames": self.frames,
            "height": self.height,
            "width": self.width,
            "decode_s": round(self.decode_s, 3),
            "total_s": round(self.total_s, 3),
            "planned_peak_bytes": self.memory.planned_peak_bytes,
            "measured_peak_bytes": self.memory.measured_peak_bytes,
            "measured_by": self.memory.measured_by,
            "tile": [[stage.rows, stage.cols] for stage in self.plan.stages],
            "halo": [stage.halo for stage in self.plan.stages],
            "tiling": self.plan.tiling,
            "pixels": self.exactness,
            "host_bytes": self.plan.host_bytes,
            "rgb_sha256": self.rgb_sha256,
            "out": str(self.path),
        }

    def summary(self) -> str:
        """Return a few lines for people."""
        where = "device" if self.plan.has_device_caches else "host memory"
        grids = ", ".join(f"{stage.cols}x{stage.rows}" for stage in self.plan.stages) or "overlapping tiles"
        return (
            f"{self.frames} frames {self.width}x{self.height} in {self.total_s:.1f} s, pixels {self.exactness}\n"
            f"stages {grids}; causal caches in {where}; host bytes {format_bytes(self.plan.host_bytes)}\n"
            f"{self.memory}"
        )


def plan_for(shape: LatentShape, tree: DecoderTree, tiling: str | int, device_bytes: int | None) -> DecodePlan:
    """Plan a decode of latents of ``shape`` by ``tree``, all of it within ``device_bytes``; None is no limit.

    Raises:
        RequestError: ``tiling`` is unknown.
        BudgetError: Nothing fits.
    """
    element_bytes, weight_bytes = tree.dtype.itemsize, tree.weight_bytes
    if tiling == BLENDED:
        return plan_blended(tree.spec, shape, element_bytes, weight_bytes=weight_bytes, budget_bytes=device_bytes)
    return plan_decode(tree.spec, shape, element_bytes, tiling, weight_bytes=weight_bytes, budget_bytes=device_bytes)


def meter_for(device: torch.device, budget: MemoryBudget) -> MemoryMeter:
    """Return the meter of ``device``; on a processor it enforces the device budget."""
    from ..memory import CudaMeter, LiveStorageMeter, NullMeter

    if device.type == "cuda":
        return CudaMeter(device)
    if device.type == "cpu":
        return LiveStorageMeter(device, limit_bytes=budget.device_bytes)
    return NullMeter()


def decode_to_mp4(request: DecodeRequest, host: Host) -> DecodeReport:
    """Decode latents straight into a video file: plan, decode chunk by chunk, encode beside it.

    Raises:
        RequestError: The request cannot work; nothing was written.
        BudgetError: It does not fit; nothing was loaded.
        WriteError: The file could not be finished; the message says what was kept.
    """
    from ..decode import DecodeServices, decode_frames, latent_shape_of, read_decoder
    from ..write import write_mp4

    started = time.perf_counter()
    shape = latent_shape_of(request.latents, request.vae)
    tree = read_decoder(request.vae)
    plan = plan_for(shape, tree, request.tiling, _device_limit(request, host))
    if request.budget.host_bytes is not None and plan.host_bytes > request.budget.host_bytes:
        raise RequestError(
            "the decode needs more host memory than its budget",
            need=format_bytes(plan.host_bytes),
            have=format_bytes(request.budget.host_bytes),
            remedy="Raise the host budget, or the device budget so that the caches stay on the device.",
        )
    host.devices.make_room(plan.planned_peak_bytes)
    meter = meter_for(host.devices.compute, request.budget)
    meter.reset_peak()
    services = DecodeServices(host.devices, meter, host.interrupt, host.progress)
    video = shape.video(tree.spec.scale)
    watch = _Watch(host)
    chunks = watch.over(decode_frames(request.latents, request.vae, plan, services, tree=tree))
    path = write_mp4(chunks, request.path, request.video, expected_frames=video.frames, interrupt=host.interrupt)
    phase = PhaseReport("decode", plan.planned_peak_bytes, meter.peak_bytes, meter.measured_by, watch.decode_s)
    return DecodeReport(
        path=path,
        frames=video.frames,
        height=video.height,
        width=video.width,
        plan=plan,
        memory=MemoryReport((phase,)),
        decode_s=watch.decode_s,
        total_s=time.perf_counter() - started,
        rgb_sha256=watch.hasher.hexdigest(),
    )


def _device_limit(request: DecodeRequest, host: Host) -> int | None:
    """Return the device bytes that a plan may use: the budget, or without one what the host could make free."""
    if request.budget.device_bytes is not None:
        return request.budget.device_bytes
    return host.devices.free_bytes()


class _Watch:
    """Times the decoder, hashes and previews what it yields."""

    def __init__(self, host: Host) -> None:
        self.hasher = FrameHasher()
        self.decode_s = 0.0
        self._host = host

    def over(self, chunks: Iterator[FrameChunk]) -> Iterator[FrameChunk]:
        """Yield ``chunks`` unchanged; closing this closes them."""
        try:
            while True:
                before = time.perf_counter()
                chunk = next(chunks, None)
                self.decode_s += time.perf_counter() - before
                if chunk is None:
                    return
                self.hasher.add(chunk)
                self._host.progress.preview(chunk.frames[-1])
                yield chunk
        finally:
            close = getattr(chunks, "close", None)
            if close is not None:
                close()
