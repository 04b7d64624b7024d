"""Time of a denoising step: streamed, resident, and diffusers' group offloading with a stream, interleaved in one run.

Run ``python benchmarks/denoise_speed.py`` on a machine with a GPU and 64 GiB of memory: an A14B-shaped transformer of
random weights at 480x832, 17 and 81 frames. It calls ``lowmem_core.pipeline.denoise_wan``, the function that the node
calls. Streamed runs and the baseline stay inside 8 GiB (``set_per_process_memory_fraction``). The floor of a streamed
step is the bus: its bytes over the measured speed of a copy. With ``--tiny`` it runs on the processor and only prints.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from recording import write_record
from torch import nn

from lowmem_core.denoise import SamplerSettings
from lowmem_core.families.wan.config import WanConfig
from lowmem_core.families.wan.load import LoadedTransformer
from lowmem_core.families.wan.models import ModelShelf, WanFiles
from lowmem_core.families.wan.sampling import Conditioning, Guidance
from lowmem_core.host import Host, PlainDevices
from lowmem_core.memory import MemoryBudget
from lowmem_core.pipeline import WanReport, WanRequest, denoise_wan
from lowmem_core.shapes import LatentShape
from lowmem_core.tiny import tiny_wan_config
from lowmem_core.units import GiB

A14B = WanConfig((1, 2, 2), 40, 128, 16, 16, 4096, 256, 13824, 40)
SIZES = {"17 frames": LatentShape(16, 5, 60, 104), "81 frames": LatentShape(16, 21, 60, 104)}
TINY_SIZES = {"5 frames": LatentShape(16, 2, 16, 16)}
LIMIT_BYTES = 8 * GiB
STEPS, ROUNDS = 3, 2


class GivenShelf(ModelShelf):
    """Gives one transformer that is in memory."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            module = WanTransformer3DModel(**config.diffusers_arguments())
        finally:
            torch.set_default_dtype(before)
        self.transformer = LoadedTransformer(module.requires_grad_(False).eval(), config, torch.bfloat16, "random")

    def load(self, files: WanFiles, *, from_disk: bool) -> tuple[LoadedTransformer, ...]:
        """Return it."""
        return (self.transformer,)

    def describe(self, files: WanFiles) -> tuple[LoadedTransformer, ...]:
        """Return it."""
        return (self.transformer,)


def denoised(shelf: GivenShelf, shape: LatentShape, mode: str, device: torch.device) -> WanReport:
    """Return the report of a guided run in a memory mode."""
    width = shelf.transformer.config.text_dim
    embeds = torch.randn(2, 1, 512, width, generator=torch.Generator().manual_seed(0))
    request = WanRequest(
        files=WanFiles(Path("random.safetensors")),
        shape=shape,
        conditioning=Conditioning(embeds[0], embeds[1]),
        sampler=SamplerSettings("unipc", STEPS, 5.0),
        guidance=Guidance(5.0),
        memory_mode=mode,
        budget=MemoryBudget(host_bytes=1 << 50),
    )
    return denoise_wan(request, Host(PlainDevices(device)), shelf)


def offloaded_step_s(module: nn.Module, shape: LatentShape, device: torch.device) -> float:
    """Return the median seconds of both passes under diffusers' group offloading, hooks and set-up apart."""
    tree: Any = module
    stream = {"use_stream": True} if device.type == "cuda" else {}
    tree.enable_group_offload(
        onload_device=device, offload_type="block_level", num_blocks_per_group=1, non_blocking=bool(stream), **stream
    )
    latents = torch.randn(1, *shape, dtype=torch.bfloat16, device=device)
    text = torch.randn(1, 512, tree.config.text_dim, dtype=torch.bfloat16, device=device)

    def step() -> None:
        with torch.no_grad():
            for _ in range(2):
                tree(latents, torch.tensor([500.0], device=device), text, return_dict=False)

    try:
        return statistics.median(timed(step, device) for _ in range(STEPS))
    finally:
        from diffusers.hooks import HookRegistry

        for one in module.modules():
            registry = HookRegistry.check_if_exists_or_initialize(one)
            for name in list(registry.hooks):
                registry.remove_hook(name, recurse=False)
        module.to("cpu")


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of ``work``, the device's included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def bus_bytes_per_s(device: torch.device) -> float | None:
    """Return the speed of copies from pinned memory, or None where there is no bus."""
    if device.type != "cuda":
        return None
    source = torch.empty(GiB, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    return GiB / min(timed(lambda: target.copy_(source, non_blocking=True), device) for _ in range(5))


def limited(nbytes: int | None, device: torch.device) -> None:
    """Let torch take no more than ``nbytes`` of the device, or all of it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if nbytes is None else min(1.0, nbytes / total), device)


def measure(config: WanConfig, sizes: dict[str, LatentShape], device: torch.device) -> dict[str, Any]:
    """Return seconds of a step for each size, and their ratios."""
    torch.manual_seed(0)
    shelf, speed, rows = GivenShelf(config), bus_bytes_per_s(device), {}
    for name, shape in sizes.items():
        seconds: dict[str, list[float]] = {"resident": [], "stream": [], "group offload": []}
        reports: dict[str, WanReport] = {}
        for _ in range(ROUNDS):
            for mode, limit in (("resident", None), ("stream", LIMIT_BYTES)):
                limited(limit, device)
                reports[mode] = denoised(shelf, shape, mode, device)
                seconds[mode] += reports[mode].steps_s[1:]
            seconds["group offload"].append(offloaded_step_s(shelf.transformer.module, shape, device))
        limited(None, device)
        medians = {what: statistics.median(values) for what, values in seconds.items()}
        streamed = reports["stream"]
        bus_s = 0.0 if speed is None else streamed.streamed_bytes / STEPS / speed
        rows[name] = {
            "median_step_s": medians,
            "bus_floor_s": bus_s,
            "stream_over_floor": medians["stream"] / max(medians["resident"], bus_s),
            "stream_over_group_offload": medians["stream"] / medians["group offload"],
            "peak_bytes": {mode: report.memory.measured_peak_bytes for mode, report in reports.items()},
            "planned_bytes": {mode: report.memory.planned_peak_bytes for mode, report in reports.items()},
            "measured_by": streamed.memory.measured_by,
            "bits_equal": torch.equal(streamed.latents, reports["resident"].latents),
        }
    return {"steps": STEPS, "rounds": ROUNDS, "bus_bytes_per_s": speed, "sizes": rows}


def main() -> None:
    """Measure and write the record; with ``--tiny`` print it instead."""
    if "--tiny" in sys.argv[1:]:
        print(json.dumps(measure(tiny_wan_config("t2v"), TINY_SIZES, torch.device("cpu"))))
        return
    if not torch.cuda.is_available():
        sys.exit("There is no GPU; --tiny runs on the processor.")
    facts = measure(A14B, SIZES, torch.device("cuda"))
    write_record("denoise_speed", facts, machine=torch.cuda.get_device_name(), versions=("torch", "diffusers"))


if __name__ == "__main__":
    main()
