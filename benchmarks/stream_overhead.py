"""Time of streamed blocks against plain ones on the processor, interleaved, medians compared.

Run ``python benchmarks/stream_overhead.py``: about two minutes. Blocks are diffusers' own Wan blocks, wide enough
that each takes at least 20 ms. The placement is ``lowmem_core.place.streamed``, the one the node uses.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from diffusers import WanTransformer3DModel
from recording import write_record
from torch import Tensor

from lowmem_core.place import inventory_of, streamed
from lowmem_core.plan import plan_stream

CPU = torch.device("cpu")
ROUNDS, RUNS = 7, 2


def build() -> WanTransformer3DModel:
    """Return a Wan transformer of eight blocks, random weights."""
    torch.manual_seed(0)
    model = WanTransformer3DModel(num_attention_heads=8, attention_head_dim=64, ffn_dim=2048, num_layers=8)
    return model.requires_grad_(False).eval()


def main() -> None:
    """Measure and write the record."""
    model = build()
    latents, text = torch.randn(1, 16, 3, 32, 32), torch.randn(1, 512, 4096)

    def run() -> Tensor:
        output: Tensor = model(latents, torch.tensor([500]), text, return_dict=False)[0]
        return output

    inventory = inventory_of(model, model.blocks)
    placements: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "plain": nullcontext,
        "resident": lambda: streamed(model, model.blocks, plan_stream(inventory), CPU),
        "streamed": lambda: streamed(model, model.blocks, plan_stream(inventory, inventory.smallest_bytes), CPU),
    }
    times: dict[str, list[float]] = {name: [] for name in placements}
    with torch.inference_mode():
        expected = run()
        for _ in range(ROUNDS):
            for name, place in placements.items():
                with place():
                    assert torch.equal(run(), expected)
                    started = time.perf_counter()
                    for _run in range(RUNS):
                        run()
                    times[name].append((time.perf_counter() - started) / RUNS)
    medians = {name: statistics.median(values) for name, values in times.items()}
    facts = {
        "baseline": "plain",
        "block_ms": round(1000 * medians["plain"] / len(model.blocks), 1),
        "median_s": {name: round(value, 4) for name, value in medians.items()},
        "spread_s": {name: [round(min(values), 4), round(max(values), 4)] for name, values in times.items()},
        "over_plain": {name: round(medians[name] / medians["plain"], 4) for name in ("resident", "streamed")},
        "bits_equal": True,
    }
    write_record("stream_overhead", facts, machine="no GPU", versions=("torch", "diffusers"))
    print(facts)


if __name__ == "__main__":
    main()
