"""Simulated peak memory of Wan transformers at real sizes in bf16, each beside diffusers' own forward.

Run ``python benchmarks/denoise_memory.py``: no GPU is needed, it takes minutes and writes ``benchmarks/records/``.
With ``--tiny`` it takes seconds and only prints. Activations are what one call of the transformer leaves alive beside
its weights and what it was given. The whole denoise is ``lowmem_core.pipeline.denoise_wan``, the function that the
node calls, with one expert: experts share slots and take turns in the resident allocation, so a second adds nothing.

Three things differ from a run on a GPU, because tensors have no data: bytes come from a model of the allocator, the
test for NaN counts without reading the count, and blocks are copied by the streamer's synchronous path, which has the
same slots. Six of the forty blocks run: they exceed the weight budget already, and the weight bytes planned for all
forty are asserted to be the same. The baseline is the same streamed run with diffusers' forward for the lean one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from diffusers import WanTransformer3DModel
from recording import write_record
from torch import nn

from lowmem_core.denoise import SamplerSettings
from lowmem_core.families.wan.config import WanConfig
from lowmem_core.families.wan.lean import lean
from lowmem_core.families.wan.load import LoadedTransformer
from lowmem_core.families.wan.models import ModelShelf, WanFiles
from lowmem_core.families.wan.passes import run_passes
from lowmem_core.families.wan.placement import inventories_of
from lowmem_core.families.wan.sampling import Conditioning, Guidance, PassInputs
from lowmem_core.host import Host, PlainDevices
from lowmem_core.memory import CachingAllocator, MemoryBudget, SimulatedMeter, fake_module, simulation
from lowmem_core.pipeline import WanRequest, denoise_wan
from lowmem_core.pipeline.wan_plan import activations_of, forward_size, plan_wan
from lowmem_core.plan.denoise_plan import DEFAULT_WEIGHT_BYTES
from lowmem_core.plan.wan_activations import lean_forward_bytes, stock_forward_bytes
from lowmem_core.shapes import LatentShape
from lowmem_core.units import MiB, format_bytes

A14B = WanConfig((1, 2, 2), 40, 128, 16, 16, 4096, 256, 13824, 40)
TI2V = WanConfig((1, 2, 2), 24, 128, 48, 48, 4096, 256, 14336, 30)
TEXT_TOKENS = 512
STEPS = 3  # UniPC remembers most from the third step on
RUN_BLOCKS = 6
PLENTY = 1 << 50
STOCK, ONE_PASS, IN_STEP = "stock", "lean, one pass at a time", "lean, both passes in step"


@dataclass(frozen=True)
class Case:
    """A model at a size.

    Attributes:
        config: Of the model.
        shape: Of the latents.
        activation_goal: The most bytes that one pass should take beside the weights.
        run_goals: The same for a whole denoise, one pass at a time and in step, to the nearest MiB; None to run none.
    """

    config: WanConfig
    shape: LatentShape
    activation_goal: int
    run_goals: tuple[int, int] | None = None


CASES = {
    "A14B 480x832x81": Case(A14B, LatentShape(16, 21, 60, 104), 1650 * MiB, (3533 * MiB, 3840 * MiB)),
    "A14B 720x1280x81": Case(A14B, LatentShape(16, 21, 90, 160), 3790 * MiB, (5683 * MiB, 6400 * MiB)),
    "TI2V-5B 704x1280x121, a timestep per token": Case(TI2V, LatentShape(48, 31, 44, 80), 880 * MiB),
}


def build(config: WanConfig, device: str) -> WanTransformer3DModel:
    """Return a fake transformer in the types that loading gives: bf16, and float32 where diffusers keeps that."""
    module = fake_module(lambda: WanTransformer3DModel(**config.diffusers_arguments()), device)
    for name, tensor in list(module.named_parameters()):
        if not set(WanTransformer3DModel._keep_in_fp32_modules).isdisjoint(name.split(".")):
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, nn.Parameter(tensor.float(), requires_grad=False))
    return module


def loaded(config: WanConfig, device: str = "cpu") -> LoadedTransformer:
    """Return the fake transformer as the loader would hand it on."""
    return LoadedTransformer(build(config, device), config, torch.bfloat16, "a simulated file")


def request_for(case: Case, steps: int = STEPS, device_bytes: int | None = None) -> WanRequest:
    """Return a guided, streamed denoise of some steps; inside ``simulation``."""
    embeds = torch.empty(1, TEXT_TOKENS, case.config.text_dim, dtype=torch.bfloat16)
    return WanRequest(
        files=WanFiles(Path("simulated.safetensors")),
        shape=case.shape,
        conditioning=Conditioning(embeds, embeds.clone()),
        sampler=SamplerSettings("unipc", steps, 5.0),
        guidance=Guidance(5.0),
        memory_mode="stream",
        budget=MemoryBudget(device_bytes=device_bytes, host_bytes=PLENTY),
    )


def measure_forward(case: Case, passes: int, is_lean: bool) -> dict[str, Any]:
    """Return the bytes of one call of a transformer of two blocks; more blocks take no more."""
    config, shape = replace(case.config, num_layers=2), case.shape
    with simulation(), torch.no_grad():
        transformer = loaded(config, "cuda")
        latents = torch.empty(1, *shape, dtype=torch.bfloat16, device="cuda")
        told = [
            PassInputs(torch.empty(1, TEXT_TOKENS, config.text_dim, dtype=torch.bfloat16, device="cuda"))
            for _ in range(passes)
        ]
        size = forward_size(request_for(case), transformer)
        timestep = torch.empty(1, size.tokens) if size.per_token_timesteps else torch.empty(1, device="cuda")
        timestep = timestep if is_lean else timestep.to("cuda")
        allocator = CachingAllocator()
        meter = SimulatedMeter("cuda", allocator)
        with meter.measuring(), lean(transformer.module) if is_lean else nullcontext():
            if passes == 1:
                transformer.module(latents, timestep, told[0].encoder_hidden_states, return_dict=False)
            else:
                run_passes(transformer.module, latents, timestep, told, poll=lambda: None)
    return {
        "planned_bytes": (lean_forward_bytes if is_lean else stock_forward_bytes)(size, passes),
        "measured_bytes": meter.peak_bytes,
        "reserved_bytes": allocator.peak_reserved_bytes,
    }


class FakeShelf(ModelShelf):
    """Gives fake transformers of one configuration."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.transformer = loaded(config)

    def load(self, files: WanFiles, *, from_disk: bool) -> tuple[LoadedTransformer, ...]:
        """Return it."""
        return (self.transformer,)

    def describe(self, files: WanFiles) -> tuple[LoadedTransformer, ...]:
        """Return it."""
        return (self.transformer,)


@contextmanager
def without_data(meter: SimulatedMeter) -> Iterator[None]:
    """Let ``denoise_wan`` run on fake tensors: counted by ``meter``, and with a test for NaN that reads nothing."""

    def count_finite(prediction: torch.Tensor, *_: int) -> None:
        prediction.numel() - torch.isfinite(prediction).sum()

    with (
        patch("lowmem_core.pipeline.wan.meter_for", lambda *_: meter),
        patch("lowmem_core.denoise.loop._check_finite", count_finite),
    ):
        yield


def budget_for_one_pass(request: WanRequest, transformer: LoadedTransformer) -> int:
    """Return the device bytes of 2 GiB of weights and one pass, or what is just too little for passes in step."""
    activations = activations_of(request, [transformer])
    assert activations.two_passes is not None
    too_little = inventories_of([transformer])[0].smallest_bytes + activations.two_passes - 1
    return min(DEFAULT_WEIGHT_BYTES + activations.one_pass, too_little)


def measure_run(case: Case, steps: int, *, in_step: bool, is_lean: bool = True) -> dict[str, Any]:
    """Return the bytes of a streamed denoise with up to 2 GiB of weights.

    Without a budget the plan runs passes in step; for one pass at a time the budget leaves no room for that.
    """
    started = time.perf_counter()
    allocator = CachingAllocator()
    meter = SimulatedMeter("cuda", allocator)
    with simulation(), without_data(meter), ExitStack() as stack:
        shelf = FakeShelf(replace(case.config, num_layers=RUN_BLOCKS))
        request, host = request_for(case, steps), Host(PlainDevices("cuda"))
        if not in_step:
            request = request_for(case, steps, budget_for_one_pass(request, shelf.transformer))
        if not is_lean:
            stack.enter_context(patch("lowmem_core.families.wan.lean.lean", lambda module: nullcontext(module)))
        report = denoise_wan(request, host, shelf)
        whole, _ = plan_wan(request, host, FakeShelf(case.config))
    assert report.plan.shares_blocks is whole.shares_blocks is in_step
    assert report.plan.weight_bytes == whole.weight_bytes
    facts = {
        "budget_bytes": request.budget.device_bytes,
        "planned_bytes": report.memory.planned_peak_bytes,
        "planned_weight_bytes": report.plan.weight_bytes,
        "measured_bytes": report.memory.measured_peak_bytes,
        "reserved_bytes": allocator.peak_reserved_bytes,
        "reserved_over_allocated": round(allocator.peak_reserved_bytes / meter.peak_bytes, 4),
        "blocks_run": RUN_BLOCKS,
        "streamed_bytes": report.streamed_bytes,
        "measured_by": report.memory.measured_by,
        "wall_s": round(time.perf_counter() - started, 1),
    }
    if not is_lean:  # the plan is that of the lean forward
        del facts["planned_bytes"]
    return facts


def measure(cases: dict[str, Case], steps: int = STEPS) -> dict[str, Any]:
    """Return the figures of all cases, each row measured by a process of its own."""
    facts: dict[str, Any] = {"activations": {}, "whole_denoise": {}}
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        forwards = {
            (name, what): pool.submit(measure_forward, case, 1 + (what == IN_STEP), is_lean=what != STOCK)
            for name, case in cases.items()
            for what in (STOCK, ONE_PASS, IN_STEP)
        }
        runs = {
            (name, what): pool.submit(measure_run, case, steps, in_step=what == IN_STEP, is_lean=what != STOCK)
            for name, case in cases.items()
            for what in (STOCK, ONE_PASS, IN_STEP)
            if case.run_goals is not None
        }
        for part, rows in (("activations", forwards), ("whole_denoise", runs)):
            for (name, what), row in rows.items():
                facts[part].setdefault(name, {})[what] = row.result()
                show(f"{part}, {name}, {what}", row.result())
    for name, case in cases.items():
        facts["activations"][name]["goal_bytes"] = case.activation_goal
        if case.run_goals is not None:
            facts["whole_denoise"][name]["goal_bytes"] = dict(zip((ONE_PASS, IN_STEP), case.run_goals, strict=True))
    return facts


def show(name: str, row: dict[str, Any]) -> None:
    """Print a line."""
    plan = f", planned {format_bytes(row['planned_bytes'])}" if "planned_bytes" in row else ""
    print(
        f"{name}: {format_bytes(row['measured_bytes'])}, reserved {format_bytes(row['reserved_bytes'])}{plan}",
        file=sys.stderr,
        flush=True,
    )


def tiny_cases() -> dict[str, Case]:
    """Return the same models at two latent frames; only the first denoises."""
    tiny = {name: replace(case, shape=case.shape._replace(frames=2)) for name, case in CASES.items()}
    first = next(iter(tiny))
    return {name: case if name == first else replace(case, run_goals=None) for name, case in tiny.items()}


def main() -> None:
    """Measure and write the record; with ``--tiny`` print it instead."""
    if "--tiny" in sys.argv[1:]:
        print(json.dumps(measure(tiny_cases(), steps=1)))
        return
    facts = {"dtype": "bfloat16", "text_tokens": TEXT_TOKENS, "steps": STEPS, **measure(CASES)}
    write_record("denoise_memory", facts, machine="no GPU: simulated", versions=("torch", "diffusers"))


if __name__ == "__main__":
    main()
