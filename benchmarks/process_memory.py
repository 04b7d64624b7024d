"""Process memory of a real decode and write of the tiny VAE, at 81 and at 5,000 frames: the slope per frame.

Run ``python benchmarks/process_memory.py``; each length runs in a process of its own. It calls
``lowmem_core.pipeline.decode_to_mp4``, the function that the node calls, and writes ``benchmarks/records/``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from fractions import Fraction
from pathlib import Path

from recording import write_record

LENGTHS = (21, 1251)  # latent frames: 81 and 5,001 frames


def run_one(latent_frames: int) -> None:
    """Decode one video and print its frames and the peak of anonymous bytes as JSON."""
    import torch

    from lowmem_core.host import Host, PlainDevices
    from lowmem_core.memory import ProcessMeter
    from lowmem_core.pipeline import DecodeRequest, decode_to_mp4
    from lowmem_core.tiny.wan_vae import tiny_wan_vae_tensors
    from lowmem_core.vae import wan_vae_from_tensors
    from lowmem_core.write import VideoSettings

    vae = wan_vae_from_tensors(tiny_wan_vae_tensors("2.2"), torch.float32)
    latents = torch.randn(1, 48, latent_frames, 4, 4, generator=torch.Generator().manual_seed(0))
    meter = ProcessMeter()
    with tempfile.TemporaryDirectory() as folder, meter.measuring():
        request = DecodeRequest(latents, vae, Path(folder) / "out.mp4", VideoSettings(fps=Fraction(24)))
        report = decode_to_mp4(request, Host(PlainDevices("cpu")))
    print(json.dumps({"frames": report.frames, "peak_bytes": meter.host_peak_bytes, "total_s": report.total_s}))


def main() -> None:
    """Run both lengths and write the record."""
    if len(sys.argv) > 1:
        run_one(int(sys.argv[1]))
        return
    rows = []
    for length in LENGTHS:
        command = [sys.executable, __file__, str(length)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    slope = (rows[1]["peak_bytes"] - rows[0]["peak_bytes"]) / (rows[1]["frames"] - rows[0]["frames"])
    facts = {
        "vae": "tiny Wan 2.2, 64x64, fp32",
        "measured_by": "rss (anonymous)",
        "runs": rows,
        "slope_bytes_per_frame": round(slope),
    }
    write_record("process_memory", facts, machine="no GPU")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
