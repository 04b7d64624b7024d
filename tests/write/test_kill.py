"""A killed process loses at most one second of video."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from lowmem_core.errors import RequestError
from lowmem_core.frames import FrameChunk
from lowmem_core.write import AudioTrack, VideoSettings, encoders, probe_video
from lowmem_core.write.part_writer import PartWriter

ROOT = Path(__file__).resolve().parents[2]
FPS = 24
# Not yet handed to the encoder: one chunk waits at the queue, two are in it, one is being converted.
ON_THE_WAY = 4

PROGRAM = """
import sys, torch
from pathlib import Path
from lowmem_core.frames import FrameChunk
from lowmem_core.write import AudioTrack, VideoSettings, write_mp4

noise = torch.rand(128, 256, 3)

def chunks():
    for index in range(100_000):
        print(index, flush=True)
        yield FrameChunk(noise[None, index % 64 : index % 64 + 64, : 96].contiguous(), index)

write_mp4(chunks(), Path(sys.argv[1]), VideoSettings(fps=24, audio=AudioTrack(torch.rand(2, 96000), 48000)))
"""


@pytest.mark.parametrize("moment", [40, 60, 101])
def test_kill_9_costs_at_most_a_second(tmp_path: Path, decode, moment: int) -> None:
    """After SIGKILL the part decodes, and lacks at most one second of what the encoder was given."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "clip.mp4")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        last = 0
        for line in process.stdout:
            last = int(line)
            if last == moment:
                process.send_signal(signal.SIGKILL)
        process.wait()
    handed = last - ON_THE_WAY
    found = decode(tmp_path / "clip.partial.mp4")
    assert os.listdir(tmp_path) == ["clip.partial.mp4"]
    assert len(found) >= handed - FPS
    assert found[-1].pts * found[-1].time_base >= Fraction(handed - FPS - 1, FPS)


@pytest.mark.parametrize("cores", [1, 16])
@pytest.mark.parametrize("fps", [2, 16, 24])
@pytest.mark.parametrize("codec", ["h264", "hevc", "av1"])
def test_no_encoder_holds_more_than_a_second(tmp_path, monkeypatch, codec: str, fps: int, cores: int) -> None:
    """At every frame, what is on the disk lacks at most one second, whatever the number of cores."""
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    settings = VideoSettings(
        fps=Fraction(fps), codec=codec, preset="veryfast", audio=AudioTrack(torch.rand(1, 48000), 48000)
    )
    try:
        encoders.find_encoder(settings)
    except RequestError as error:
        pytest.skip(str(error))
    noise = torch.rand(256, 320, 3)
    writer = PartWriter(tmp_path / "clip.mp4", settings)
    held = []
    for index in range(math.ceil(2 * fps)):
        writer.write(FrameChunk(noise[None, index : index + 144, :192].contiguous(), index))
        if index >= fps and index % max(1, fps // 8) == 0:
            shutil.copy(writer.path, tmp_path / "seen.mp4")
            held.append(writer.frames - probe_video(tmp_path / "seen.mp4").frames)
    writer.close()
    assert max(held) <= fps
