"""Wall time of decode and write together against the longer alone, the decoder waiting as on a GPU.

Run ``python benchmarks/overlap.py``. The writer is ``lowmem_core.write.write_mp4``; the source sleeps as long per
chunk as the encoder alone needs, which is the worst case for overlap. It writes ``benchmarks/records/overlap.json``.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import torch
from recording import write_record

from lowmem_core.frames import FrameChunk
from lowmem_core.write import VideoSettings, write_mp4

CHUNKS, HEIGHT, WIDTH = 30, 480, 832


def chunks(wait_s: float) -> Iterator[FrameChunk]:
    """Yield moving noise in chunks of four frames, each after ``wait_s`` seconds without using the processor."""
    noise = torch.rand(HEIGHT + 128, WIDTH, 3, generator=torch.Generator().manual_seed(0))
    for index in range(CHUNKS):
        time.sleep(wait_s)
        views = [noise[4 * index + k : 4 * index + k + HEIGHT] for k in range(4)]
        yield FrameChunk(torch.stack(views), 4 * index)


def timed(wait_s: float) -> float:
    """Return the seconds of one write."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        write_mp4(chunks(wait_s), Path(folder) / "out.mp4", VideoSettings(fps=Fraction(16)))
        return time.perf_counter() - started


def main() -> None:
    """Measure and write the record."""
    timed(0.0)
    rows = []
    for _ in range(3):
        write_s = timed(0.0)
        wait_s = write_s / CHUNKS
        started = time.perf_counter()
        for _chunk in chunks(wait_s):
            pass
        decode_s = time.perf_counter() - started
        together_s = timed(wait_s)
        rows.append({"write_s": write_s, "decode_s": decode_s, "together_s": together_s})
    ratios = sorted(row["together_s"] / max(row["write_s"], row["decode_s"]) for row in rows)
    facts = {
        "shape": f"{WIDTH}x{HEIGHT}x{4 * CHUNKS}, h264",
        "runs": rows,
        "together_over_longer": {"median": round(ratios[1], 3), "worst": round(ratios[2], 3)},
    }
    write_record("overlap", facts, versions=("torch", "av"))
    print(facts["together_over_longer"])


if __name__ == "__main__":
    main()
