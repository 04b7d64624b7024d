"""Sound has the length of the pictures and starts with them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from lowmem_core.errors import RequestError
from lowmem_core.write import AudioTrack, VideoSettings, probe_video, write_mp4

RATE = 48_000


def tone(seconds: float, channels: int = 2) -> torch.Tensor:
    """Return a 440 Hz tone, ``[1, channels, samples]``."""
    time = torch.arange(round(seconds * RATE)) / RATE
    return (0.5 * torch.sin(2 * math.pi * 440 * time)).expand(1, channels, -1)


def sound_of(path: Path) -> np.ndarray:
    """Return the decoded sound, ``[channels, samples]``."""
    import av

    with av.open(str(path)) as container:
        return np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)


@pytest.mark.parametrize("seconds", [0.3, 2.0, 5.0])
def test_sound_is_cut_or_padded_to_the_video(tmp_path: Path, clip, seconds: float) -> None:
    """Two seconds of video have two seconds of sound, silent after the end of the waveform."""
    settings = VideoSettings(fps=24, audio=AudioTrack(tone(seconds), RATE))
    path = write_mp4(clip(48), tmp_path / "clip.mp4", settings)
    sound = sound_of(path)
    assert probe_video(path).has_audio
    assert abs(sound.shape[1] - 2 * RATE) <= 1024
    heard = round(min(seconds, 2.0) * RATE) - 2048
    assert np.abs(sound[:, 2048:heard]).max() == pytest.approx(0.5, abs=0.05)
    assert np.abs(sound[:, heard + 6144 :]).max(initial=0.0) < 0.01


def test_sound_starts_with_the_first_frame(tmp_path: Path, clip) -> None:
    """A click after one second of video is heard at one second, within a millisecond."""
    click = torch.zeros(1, 2 * RATE)
    click[:, RATE : RATE + 24] = 0.9
    settings = VideoSettings(fps=16, audio=AudioTrack(click, RATE))
    sound = sound_of(write_mp4(clip(32), tmp_path / "clip.mp4", settings))
    assert abs(int(np.abs(sound[0]).argmax()) - RATE) < RATE / 1000


@pytest.mark.parametrize("channels", [1, 2, 6])
def test_common_layouts_are_kept(tmp_path: Path, clip, channels: int) -> None:
    """Mono, stereo and 5.1 come back with as many channels."""
    settings = VideoSettings(fps=24, audio=AudioTrack(tone(0.5, channels), RATE))
    assert channels == sound_of(write_mp4(clip(12), tmp_path / "clip.mp4", settings)).shape[0]


@pytest.mark.parametrize(
    ("waveform", "rate", "words"),
    [
        (torch.zeros(100), RATE, "shape"),
        (torch.zeros(2, 2, 100), RATE, "shape"),
        (torch.zeros(3, 100), RATE, "1, 2 or 6 channels"),
        (torch.zeros(2, 0), RATE, "at least one sample"),
        (torch.zeros(2, 9, dtype=torch.int16), RATE, "floating-point"),
        (torch.full((2, 9), float("nan")), RATE, "finite"),
        (torch.zeros(2, 9), 12345, "12345 Hz"),
    ],
)
def test_impossible_sound_is_refused(waveform: torch.Tensor, rate: int, words: str) -> None:
    """A waveform that AAC cannot hold is refused before any frame is made."""
    with pytest.raises(RequestError, match=words):
        AudioTrack(waveform, rate)
