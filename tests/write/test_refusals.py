"""Frames and targets that cannot work are refused before anything wrong is on the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lowmem_core.errors import RequestError, WriteError
from lowmem_core.frames import FrameChunk
from lowmem_core.write import VideoSettings, probe_video, write_mp4

SETTINGS = VideoSettings(fps=24, preset="ultrafast")
GOOD = torch.rand(4, 64, 96, 3)


def spoiled(value: float) -> torch.Tensor:
    """Return good frames with one bad sample in the last of them."""
    frames = GOOD.clone()
    frames[3, 5, 7, 1] = value
    return frames


BAD = {
    "odd height": (torch.rand(4, 63, 96, 3), "96x62"),
    "odd width": (torch.rand(4, 64, 95, 3), "94x64"),
    "four channels": (torch.rand(4, 64, 96, 4), "wrong shape"),
    "three axes": (torch.rand(64, 96, 3), "wrong shape"),
    "no frame": (torch.rand(0, 64, 96, 3), "wrong shape"),
    "integers": (torch.zeros(4, 64, 96, 3, dtype=torch.uint8), "wrong type"),
    "elsewhere": (torch.zeros(4, 64, 96, 3, device="meta"), "main memory"),
    "nan": (spoiled(float("nan")), r"frame [37] holds NaN"),
    "infinity": (spoiled(float("-inf")), r"frame [37] holds NaN"),
    "other size": (torch.rand(4, 64, 64, 3), "change their size"),
}


@pytest.mark.parametrize("name", sorted(set(BAD) - {"other size"}))
def test_a_bad_first_chunk_leaves_no_file(tmp_path: Path, name: str) -> None:
    """The first chunk is checked whole before a file exists."""
    frames, words = BAD[name]
    with pytest.raises(RequestError, match=words):
        write_mp4([FrameChunk(frames, 0)], tmp_path / "clip.mp4", SETTINGS)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", sorted(BAD))
def test_a_bad_later_chunk_keeps_the_frames_before_it(tmp_path: Path, name: str) -> None:
    """The error says what was wrong and where the good frames are; none of the bad chunk is among them."""
    frames, words = BAD[name]
    chunks = [FrameChunk(GOOD, 0), FrameChunk(frames, 4)]
    with pytest.raises(RequestError, match=words) as caught:
        write_mp4(chunks, tmp_path / "clip.mp4", SETTINGS)
    assert os.listdir(tmp_path) == ["clip.partial.mp4"]
    assert str(tmp_path / "clip.partial.mp4") in str(caught.value)
    assert probe_video(tmp_path / "clip.partial.mp4").frames == 4


@pytest.mark.parametrize(("frames", "expected"), [(0, None), (0, 8), (4, 8), (12, 8)])
def test_a_wrong_number_of_frames_is_refused(tmp_path: Path, clip, frames: int, expected: int | None) -> None:
    """No frames at all, or not as many as announced, never become a finished file."""
    with pytest.raises(RequestError, match=r"too early|too many"):
        write_mp4(clip(frames), tmp_path / "clip.mp4", SETTINGS, expected_frames=expected)
    assert not (tmp_path / "clip.mp4").exists()


@pytest.mark.parametrize("first", [0, 3, 8])
def test_frames_out_of_order_are_refused(tmp_path: Path, first: int) -> None:
    """A chunk that repeats or skips frames is not silently joined."""
    chunks = [FrameChunk(GOOD, 0), FrameChunk(GOOD, first)]
    with pytest.raises(RequestError, match="not in order; need frame 4 next"):
        write_mp4(chunks, tmp_path / "clip.mp4", SETTINGS)


@pytest.mark.parametrize("name", ["clip.mov", "clip", "missing/clip.mp4", "folder.mp4"])
def test_an_impossible_target_is_refused_before_the_first_frame(tmp_path: Path, name: str) -> None:
    """Nothing is decoded for a file that could never be written, and the generator is closed."""
    (tmp_path / "folder.mp4").mkdir()
    pulled = []
    with pytest.raises(RequestError):
        write_mp4((pulled.append(i) for i in range(3)), tmp_path / name, SETTINGS)
    assert pulled == []
    assert os.listdir(tmp_path) == ["folder.mp4"]


def test_a_folder_without_permission_is_refused_before_the_first_frame(tmp_path: Path) -> None:
    """A read-only folder is found before hours of decoding, not after."""
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("this user may write everywhere")
    pulled = []
    with pytest.raises(WriteError, match="cannot be written to"):
        write_mp4((pulled.append(i) for i in range(3)), tmp_path / "clip.mp4", SETTINGS)
    assert pulled == []


def test_a_folder_that_refuses_files_is_found_before_the_first_frame(tmp_path: Path, monkeypatch) -> None:
    """The same for every reason that the system may have."""

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    pulled = []
    with pytest.raises(WriteError, match="cannot be written to"):
        write_mp4((pulled.append(i) for i in range(3)), tmp_path / "clip.mp4", SETTINGS)
    assert pulled == []
