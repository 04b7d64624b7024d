"""Colours arrive as they left: BT.709, limited range, tagged so, and with real 10 bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lowmem_core.frames import FrameChunk
from lowmem_core.write import VideoSettings, write_mp4

COLOURS = {
    "black": (0.0, 0.0, 0.0),
    "white": (1.0, 1.0, 1.0),
    "red": (1.0, 0.0, 0.0),
    "green": (0.0, 1.0, 0.0),
    "blue": (0.0, 0.0, 1.0),
    "skin": (0.8, 0.55, 0.45),
}


def bt709(colour: tuple[float, float, float], bits: int) -> list[float]:
    """Return Y, Cb, Cr of ITU-R BT.709 in limited range, unrounded."""
    red, green, blue = colour
    luma = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    scale = 2 ** (bits - 8)
    chroma = [(blue - luma) / 1.8556, (red - luma) / 1.5748]
    return [scale * (16 + 219 * luma), *(scale * (128 + 224 * value) for value in chroma)]


def planes(frame, bits: int) -> list[np.ndarray]:
    """Return the Y, Cb and Cr samples of a decoded frame."""
    dtype = np.dtype(np.uint8 if bits == 8 else "<u2")
    found = []
    for plane in frame.planes:
        rows = np.frombuffer(plane, dtype).reshape(plane.height, plane.line_size // dtype.itemsize)
        found.append(rows[:, : plane.width])
    return found


@pytest.mark.parametrize("bits", [8, 10])
@pytest.mark.parametrize("name", COLOURS)
def test_known_colours_have_their_bt709_values(tmp_path: Path, decode, name: str, bits: int) -> None:
    """Every sample is within one level of the standard's value."""
    frames = torch.tensor(COLOURS[name]).expand(2, 64, 96, 3)
    settings = VideoSettings(fps=24, bit_depth=bits, crf=1)
    path = write_mp4([FrameChunk(frames, 0)], tmp_path / "clip.mp4", settings)
    expected = bt709(COLOURS[name], bits)
    for samples, value in zip(planes(decode(path)[0], bits), expected, strict=True):
        assert np.abs(samples - value).max() <= 1.0


@pytest.mark.parametrize("bits", [8, 10])
def test_the_stream_says_bt709_limited(tmp_path: Path, decode, bits: int) -> None:
    """Matrix, primaries, transfer and range are tagged, so no player has to guess."""
    import av

    frames = torch.full((2, 64, 96, 3), 0.5)
    path = write_mp4([FrameChunk(frames, 0)], tmp_path / "clip.mp4", VideoSettings(fps=24, bit_depth=bits))
    with av.open(str(path)) as container:
        context = container.streams.video[0].codec_context
        tags = (context.colorspace, context.color_primaries, context.color_trc, context.color_range)
    assert tuple(int(tag) for tag in tags) == (1, 1, 1, 1)
    assert b"colrnclx\x00\x01\x00\x01\x00\x01\x00" in path.read_bytes()


@pytest.mark.parametrize("bits", [8, 10])
def test_ten_bits_are_real(tmp_path: Path, decode, bits: int) -> None:
    """A grey ramp finer than 8 bits keeps more than 256 levels with 10 bits, and only then."""
    ramp = torch.linspace(0, 1, 1024).reshape(1, 1, 1024, 1).expand(1, 64, 1024, 3)
    settings = VideoSettings(fps=24, bit_depth=bits, crf=0 if bits == 10 else 1)
    path = write_mp4([FrameChunk(ramp, 0)], tmp_path / "clip.mp4", settings)
    luma = planes(decode(path)[0], bits)[0]
    levels = len(np.unique(luma))
    assert levels > 800 if bits == 10 else levels <= 220


def test_values_outside_the_range_are_clamped(tmp_path: Path, decode) -> None:
    """A VAE's overshoot becomes black or white, not a wrapped-around colour."""
    frames = torch.cat([torch.full((1, 64, 48, 3), -0.5), torch.full((1, 64, 48, 3), 1.5)], dim=2)
    for bits in (8, 10):
        settings = VideoSettings(fps=24, bit_depth=bits, crf=1)
        path = write_mp4([FrameChunk(frames, 0)], tmp_path / f"{bits}.mp4", settings)
        luma = planes(decode(path)[0], bits)[0]
        scale = 2 ** (bits - 8)
        assert abs(int(luma[32, 8]) - 16 * scale) <= 2 * scale
        assert abs(int(luma[32, 88]) - 235 * scale) <= 2 * scale
