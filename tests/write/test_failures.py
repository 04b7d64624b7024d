"""However a run ends, the frames before the end can be played, and the user learns where they are."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path

import pytest

from lowmem_core.errors import WriteError
from lowmem_core.write import VideoSettings, finish, part, probe_video, write_mp4

SETTINGS = VideoSettings(fps=24, preset="ultrafast")
PART = "clip.partial.mp4"


@pytest.fixture(autouse=True)
def _no_thread_survives():
    """Every test ends without an encoder thread."""
    yield
    assert [t.name for t in threading.enumerate() if t.name == "lowmem-encoder"] == []


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_error_of_the_source_passes_unchanged(tmp_path: Path, clip, caplog, kind: type) -> None:
    """The decoder's own error reaches the caller, every frame before it is kept, and the log says where."""
    error = kind("stop")

    def failing():
        yield from clip(40)
        raise error

    with caplog.at_level(logging.WARNING), pytest.raises(kind) as caught:
        write_mp4(failing(), tmp_path / "clip.mp4", SETTINGS)
    assert caught.value is error
    assert os.listdir(tmp_path) == [PART]
    assert probe_video(tmp_path / PART).frames == 40
    assert f"The first 40 frames are in {tmp_path / PART}" in caplog.text


def test_an_interrupt_stops_the_source(tmp_path: Path, clip) -> None:
    """The host's exception passes unchanged, the generator is closed, and the frames so far are kept."""

    class StopError(Exception):
        pass

    class Button:
        checks = 0

        def check(self) -> None:
            self.checks += 1
            if self.checks > 5:
                raise StopError

    closed = []

    def endless():
        try:
            yield from clip(100_000)
        finally:
            closed.append(True)

    with pytest.raises(StopError):
        write_mp4(endless(), tmp_path / "clip.mp4", SETTINGS, interrupt=Button())
    assert closed == [True]
    assert 4 <= probe_video(tmp_path / PART).frames <= 20


def test_parts_can_be_unwanted(tmp_path: Path, clip) -> None:
    """With ``keep_partial`` off nothing is left."""

    def failing():
        yield from clip(40)
        raise RuntimeError

    settings = VideoSettings(fps=24, preset="ultrafast", keep_partial=False)
    with pytest.raises(RuntimeError):
        write_mp4(failing(), tmp_path / "clip.mp4", settings)
    assert os.listdir(tmp_path) == []


def test_an_abandoned_generator_of_the_caller_ends_the_thread(tmp_path: Path, clip) -> None:
    """A writer inside a generator that is closed early leaves no thread and keeps its part."""

    def source(steps):
        for chunk in clip(400):
            steps.append(chunk.first_frame)
            if len(steps) == 6:
                raise GeneratorExit
            yield chunk

    steps: list[int] = []
    with pytest.raises(GeneratorExit):
        write_mp4(source(steps), tmp_path / "clip.mp4", SETTINGS)
    assert probe_video(tmp_path / PART).frames == 20


@pytest.mark.parametrize("limit", [0, 500, 60_000])
def test_a_full_disk_keeps_what_was_flushed(tmp_path: Path, clip, monkeypatch, limit: int) -> None:
    """The error names the cause and the part; an empty part is not kept; an old target is as it was."""
    (tmp_path / "clip.mp4").write_bytes(b"old")
    written = part.PartFile.write
    total = [0]

    def limited(self, data: bytes) -> int:
        room = limit - total[0]
        total[0] += len(data)
        written(self, data[: max(0, room)])
        if len(data) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(data)

    monkeypatch.setattr(part.PartFile, "write", limited)
    pulled = []
    source = (pulled.append(chunk.first_frame) or chunk for chunk in clip(4000))
    with pytest.raises(WriteError, match="No space left on device") as caught:
        write_mp4(source, tmp_path / "clip.mp4", SETTINGS)
    assert len(pulled) < 100
    assert (tmp_path / "clip.mp4").read_bytes() == b"old"
    if limit < 1000:
        assert caught.value.partial_path is None
        assert os.listdir(tmp_path) == ["clip.mp4"]
    else:
        assert tmp_path / PART == caught.value.partial_path
        assert str(tmp_path / PART) in str(caught.value)
        assert probe_video(tmp_path / PART).frames >= 1


def test_a_failing_finish_keeps_the_whole_part(tmp_path: Path, clip, monkeypatch) -> None:
    """When only the last step fails, every frame is in the part and no draft is left."""

    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(finish.os, "replace", full)
    with pytest.raises(WriteError, match="The first 30 frames are in"):
        write_mp4(clip(30), tmp_path / "clip.mp4", SETTINGS)
    assert os.listdir(tmp_path) == [PART]
    assert probe_video(tmp_path / PART).frames == 30


def test_a_copy_that_lost_frames_never_becomes_the_target(tmp_path: Path, clip, monkeypatch) -> None:
    """The finished file is counted before it replaces anything."""
    every = finish.whole_packets

    def lossy(container, *streams):
        packets = list(every(container, *streams))
        yield from packets[:-1]

    monkeypatch.setattr(finish, "whole_packets", lossy)
    with pytest.raises(WriteError, match="96x64x9") as caught:
        write_mp4(clip(9), tmp_path / "clip.mp4", SETTINGS)
    assert os.listdir(tmp_path) == [PART]
    assert tmp_path / PART == caught.value.partial_path


def test_an_encoder_that_refuses_leaves_no_file(tmp_path: Path, clip, monkeypatch) -> None:
    """Options that the encoder rejects are a clear error without an empty part."""
    monkeypatch.setattr("lowmem_core.write.encoders.encoder_options", lambda _: {"preset": "warp"})
    with pytest.raises(WriteError, match="settings that the encoder takes"):
        write_mp4(clip(40), tmp_path / "clip.mp4", SETTINGS)
    assert os.listdir(tmp_path) == []


def test_the_part_can_be_played_while_it_grows(tmp_path: Path, clip, decode) -> None:
    """A cut at any byte still decodes up to the last whole fragment."""

    def failing():
        yield from clip(60)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_mp4(failing(), tmp_path / "clip.mp4", SETTINGS)
    data = (tmp_path / PART).read_bytes()
    counts = []
    for tenths in range(3, 11):
        (tmp_path / "cut.mp4").write_bytes(data[: len(data) * tenths // 10])
        counts.append(probe_video(tmp_path / "cut.mp4").frames)
    assert counts == sorted(counts)
    assert counts[0] > 0
    assert counts[-1] == len(decode(tmp_path / PART)) == 60
