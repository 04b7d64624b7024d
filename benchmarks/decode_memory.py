"""Simulated peak memory and multiply-adds of Wan VAE decodes at real sizes, each beside the stock decode.

Run ``python benchmarks/decode_memory.py``: no GPU is needed, it takes minutes and writes ``benchmarks/records/``.
The decode is ``lowmem_core.decode.decode_samples``, the function that the node runs, on a simulated
CUDA device in bf16.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from recording import write_record

from lowmem_core.decode import DecodeServices, decode_samples, read_decoder
from lowmem_core.host import PlainDevices
from lowmem_core.memory import MultiplyAddCounter, SimulatedMeter, fake_module, simulation
from lowmem_core.plan import plan_decode
from lowmem_core.shapes import LatentShape
from lowmem_core.units import GiB, MiB

LATENT_FRAMES = 4  # the peak is reached at the second latent frame; a test holds that it does not grow


def build_21() -> AutoencoderKLWan:
    """Return the Wan 2.1 VAE at its real widths."""
    return AutoencoderKLWan()


def build_22() -> AutoencoderKLWan:
    """Return the Wan 2.2 TI2V VAE at its real widths."""
    return AutoencoderKLWan(
        base_dim=160,
        decoder_base_dim=256,
        z_dim=48,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        latents_mean=[0.0] * 48,
        latents_std=[1.0] * 48,
    )


CASES = {
    "wan2.1 480x832x81": (build_21, LatentShape(16, 21, 60, 104)),
    "wan2.1 720x1280x81": (build_21, LatentShape(16, 21, 90, 160)),
    "wan2.2 704x1280x121": (build_22, LatentShape(48, 31, 44, 80)),
}


def measure_ours(build: Any, shape: LatentShape) -> dict[str, Any]:
    """Run the canonical plan with its caches in host memory; return bytes and multiply-adds."""
    with simulation():
        vae = fake_module(build, "cuda", torch.bfloat16)
        tree = read_decoder(vae)
        weights = tree.weight_bytes
        plan = plan_decode(tree.spec, shape, 2, weight_bytes=weights, budget_bytes=weights + GiB // 2 + GiB // 8)
        meter, work = SimulatedMeter("cuda"), MultiplyAddCounter()
        services = DecodeServices(devices=PlainDevices("cuda"), meter=meter)
        latents = torch.empty(1, shape.channels, LATENT_FRAMES, shape.height, shape.width, device="cpu")
        started = time.perf_counter()
        with work:
            for _ in decode_samples(latents, vae, plan, services):
                pass
    return {
        "planned_activation_peak_bytes": plan.activation_peak_bytes,
        "measured_activation_peak_bytes": meter.peak_bytes - weights,
        "measured_by": meter.measured_by,
        "is_canonical": plan.is_canonical,
        "has_device_caches": plan.has_device_caches,
        "planned_work_ratio": round(plan.work_ratio, 4),
        "multiply_adds": work.total,
        "weight_bytes": weights,
        "host_bytes": plan.host_bytes,
        "bus_bytes_per_latent_frame": plan.bus_bytes_per_latent_frame,
        "stages": [[s.rows, s.cols, s.halo] for s in plan.stages],
        "wall_s": round(time.perf_counter() - started, 1),
    }


def measure_stock(build: Any, shape: LatentShape, frames: int) -> dict[str, Any]:
    """Run diffusers' own untiled decode of ``frames`` latent frames."""
    with simulation(), torch.no_grad():
        vae = fake_module(build, "cuda", torch.bfloat16)
        meter, work = SimulatedMeter("cuda"), MultiplyAddCounter()
        meter.track(vae.parameters())
        meter.reset_peak()
        before = meter.live_bytes
        latents = torch.empty(1, shape.channels, frames, shape.height, shape.width, device="cuda", dtype=torch.bfloat16)
        with meter.measuring(), work:
            vae.decode(latents, return_dict=False)
    return {"measured_activation_peak_bytes": meter.peak_bytes - before, "multiply_adds": work.total}


def main() -> None:
    """Measure every case and write the record."""
    rows = {}
    for name, (build, shape) in CASES.items():
        ours = measure_ours(build, shape)
        same = measure_stock(build, shape, LATENT_FRAMES)
        stock = measure_stock(build, shape, shape.frames)
        ratio = ours["multiply_adds"] / same["multiply_adds"]
        rows[name] = {"ours": ours, "stock": stock, "multiply_adds_over_stock": round(ratio, 4)}
        ours_mib = ours["measured_activation_peak_bytes"] / MiB
        print(
            f"{name}: stock {stock['measured_activation_peak_bytes'] / MiB:.0f} MiB, ours {ours_mib:.0f} MiB, "
            f"planned {ours['planned_activation_peak_bytes'] / MiB:.0f} MiB, work {ratio:.3f}x"
        )
    facts = {"dtype": "bfloat16", "latent_frames_run": LATENT_FRAMES, "cases": rows}
    write_record("decode_memory", facts, machine="no GPU: simulated", versions=("torch", "diffusers"))


if __name__ == "__main__":
    main()
