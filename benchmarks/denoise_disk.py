"""Host memory of a run of both A14B experts from disk: real sizes, sparse files, one step each.

Run ``python benchmarks/denoise_disk.py``: some minutes, and 53 GiB of files that take no room because they are holes.
It calls ``lowmem_core.pipeline.denoise_wan``, the function that the node calls. The device is the processor, so the
figure holds the slots and the root too, which a GPU would hold itself. Weights are zeros; bytes are what is measured.
"""

from __future__ import annotations

import json
import tempfile
from math import prod
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from recording import write_record

from lowmem_core.denoise import SamplerSettings
from lowmem_core.families.wan.config import WanConfig
from lowmem_core.families.wan.models import WanFiles
from lowmem_core.families.wan.sampling import Conditioning, Guidance
from lowmem_core.host import Host, PlainDevices
from lowmem_core.load import build_skeleton
from lowmem_core.memory import MemoryBudget, ProcessMeter
from lowmem_core.pipeline import WanRequest, denoise_wan
from lowmem_core.shapes import LatentShape
from lowmem_core.units import GiB, format_bytes
from lowmem_core.weights import wan_original_name

A14B = WanConfig((1, 2, 2), 40, 128, 16, 16, 4096, 256, 13824, 40)
TINY = WanConfig((1, 2, 2), 2, 128, 16, 16, 64, 64, 384, 6)


def write_sparse(path: Path, config: WanConfig) -> int:
    """Write a file of the right size whose weights are holes; return its size."""
    skeleton = build_skeleton(WanTransformer3DModel, config.diffusers_arguments())
    header, offset = {}, 0
    for name, tensor in skeleton.state_dict().items():
        nbytes = prod(tensor.shape) * 2
        place = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [offset, offset + nbytes]}
        header[wan_original_name(name)] = place
        offset += nbytes
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + offset)
    return 8 + len(raw) + offset


def measure(config: WanConfig, host_bytes: int) -> dict[str, object]:
    """Run one step of each expert and return the figures."""
    embeds = torch.zeros(1, 16, config.text_dim)
    meter = ProcessMeter()
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{expert}.safetensors" for expert in ("high", "low")]
        file_bytes = sum(write_sparse(path, config) for path in paths)
        request = WanRequest(
            files=WanFiles(*paths),
            shape=LatentShape(16, 1, 8, 8),
            conditioning=Conditioning(embeds, embeds),
            sampler=SamplerSettings("unipc", 2, 5.0),
            guidance=Guidance(1.0),
            memory_mode="stream",
            budget=MemoryBudget(host_bytes=host_bytes),
        )
        before = meter.host_live_bytes
        with meter.measuring():
            report = denoise_wan(request, Host(PlainDevices("cpu")))
    return {
        "file_bytes": file_bytes,
        "weights_in": report.source,
        "streamed_bytes": report.streamed_bytes,
        "device_weight_bytes": report.plan.weight_bytes,
        "anonymous_bytes_before": before,
        "anonymous_bytes_peak": meter.host_peak_bytes,
        "steps_s": list(report.steps_s),
        "measured_by": "rss (anonymous)",
    }


def main() -> None:
    """Measure and write the record."""
    facts = measure(A14B, GiB) | {"model": "Wan 2.2 A14B, two experts, bf16", "goal_bytes": 3 * GiB}
    write_record("denoise_disk", facts, machine="no GPU")
    print(json.dumps(facts))
    print(format_bytes(int(str(facts["anonymous_bytes_peak"]))))


if __name__ == "__main__":
    main()
