"""A finished file holds what was asked for, and nothing else is left."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path

import pytest

from lowmem_core.errors import RequestError
from lowmem_core.write import VideoSettings, encoders, probe_video, write_mp4

CODECS = ["h264", "hevc", "av1"]


def skip_without(codec: str, bit_depth: int = 8) -> None:
    """Skip a test where this PyAV lacks the encoder."""
    try:
        encoders.find_encoder(VideoSettings(fps=Fraction(24), codec=codec, bit_depth=bit_depth))
    except RequestError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("bit_depth", [8, 10])
@pytest.mark.parametrize("codec", CODECS)
def test_the_file_is_what_was_asked_for(tmp_path: Path, clip, codec: str, bit_depth: int) -> None:
    """Frames, size, rate, length, codec and depth are right, and only the target is left."""
    skip_without(codec, bit_depth)
    settings = VideoSettings(fps="23.976", codec=codec, bit_depth=bit_depth, preset="ultrafast")
    path = write_mp4(clip(33), tmp_path / "clip.mp4", settings, expected_frames=33)
    found = probe_video(path)
    assert (found.frames, found.height, found.width) == (33, 64, 96)
    assert (codec, bit_depth, False) == (found.codec, found.bit_depth, found.has_audio)
    assert Fraction(24000, 1001) == found.fps
    assert found.duration_s == pytest.approx(33 * 1001 / 24000, abs=1e-3)
    assert os.listdir(tmp_path) == ["clip.mp4"]


@pytest.mark.parametrize("fps", [1, 8, 24])
def test_every_frame_comes_at_its_time(tmp_path: Path, clip, decode, fps: int) -> None:
    """The first frame is at time 0 and each later one exactly one frame after."""
    path = write_mp4(clip(9), tmp_path / "clip.mp4", VideoSettings(fps=fps))
    assert [Fraction(i, fps) for i in range(9)] == [frame.pts * frame.time_base for frame in decode(path)]


def test_metadata_survives_word_for_word(tmp_path: Path, clip) -> None:
    """The prompt and the workflow come back as the text that went in."""
    metadata = {"prompt": '{"1": {"text": "a \\"fox\\" = \u00fc; #"}}', "workflow": "[" + "1," * 100_000 + "2]"}
    path = write_mp4(clip(4), tmp_path / "clip.mp4", VideoSettings(fps=24, metadata=metadata))
    assert metadata == probe_video(path).metadata


def test_the_index_is_in_front_of_the_pictures(tmp_path: Path, clip) -> None:
    """A browser can start to play before it has the whole file; no fragments are left in it."""
    data = write_mp4(clip(30), tmp_path / "clip.mp4", VideoSettings(fps=24)).read_bytes()
    assert 0 < data.index(b"moov") < data.index(b"mdat")
    assert b"moof" not in data


def test_one_frame_is_a_video(tmp_path: Path, clip) -> None:
    """The shortest video has one frame."""
    assert probe_video(write_mp4(clip(1), tmp_path / "clip.mp4", VideoSettings(fps=24))).frames == 1


def test_the_target_is_replaced_at_the_very_end(tmp_path: Path, clip) -> None:
    """While the new video is written, the old file is as it was."""
    target = tmp_path / "clip.mp4"
    target.write_bytes(b"old")

    def watched():
        for chunk in clip(40):
            assert target.read_bytes() == b"old"
            yield chunk

    write_mp4(watched(), target, VideoSettings(fps=24))
    assert probe_video(target).frames == 40


def test_two_writers_do_not_meet(tmp_path: Path, clip) -> None:
    """A second writer to the same target has a part of its own, and the last one to finish wins."""
    target = tmp_path / "clip.mp4"

    def outer():
        yield from clip(8)
        write_mp4(clip(5), target, VideoSettings(fps=24))
        assert probe_video(target).frames == 5

    write_mp4(outer(), target, VideoSettings(fps=24))
    assert probe_video(target).frames == 8
    assert os.listdir(tmp_path) == ["clip.mp4"]


def test_a_part_of_an_earlier_run_is_left_alone(tmp_path: Path, clip) -> None:
    """What a killed run left is the user's to remove."""
    (tmp_path / "clip.partial.mp4").write_bytes(b"earlier")
    write_mp4(clip(5), tmp_path / "clip.mp4", VideoSettings(fps=24))
    assert (tmp_path / "clip.partial.mp4").read_bytes() == b"earlier"
    assert sorted(os.listdir(tmp_path)) == ["clip.mp4", "clip.partial.mp4"]


@pytest.mark.parametrize("data", [None, b"", b"no video at all"])
def test_probing_what_is_no_video_says_so(tmp_path: Path, data: bytes | None) -> None:
    """A missing, empty or foreign file is a clear error."""
    if data is not None:
        (tmp_path / "x.mp4").write_bytes(data)
    with pytest.raises(RequestError, match="cannot read the video"):
        probe_video(tmp_path / "x.mp4")


def test_a_missing_encoder_is_named(tmp_path: Path, clip, monkeypatch) -> None:
    """A PyAV built without an encoder is told apart from a wrong name."""
    monkeypatch.setitem(encoders.ENCODERS, "h264", "libnothing")
    with pytest.raises(RequestError, match="need a PyAV build with libnothing"):
        write_mp4(clip(4), tmp_path / "clip.mp4", VideoSettings(fps=24))
