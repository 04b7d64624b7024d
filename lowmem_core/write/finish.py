"""From a complete part to the finished file: an ordinary MP4, checked, in one step at its final name."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path
from typing import Any

from ..errors import WriteError
from ..shapes import VideoShape
from ._av import load_av
from .encoders import tag_bt709
from .part import draft_of
from .probe import probe_video, whole_packets
from .settings import VideoSettings


def finish_file(part: Path, target: Path, settings: VideoSettings, shape: VideoShape) -> None:
    """Copy the packets of ``part`` into a normal MP4, check it, and move it onto ``target``.

    ``target`` is untouched until the checked file replaces it; ``part`` is removed after that.

    Raises:
        WriteError: The copy is not what was asked for; ``part`` and ``target`` are as they were.
        OSError: A file could not be written.
    """
    draft = draft_of(part)
    try:
        _remux(part, draft, settings)
        _verify(draft, settings, shape)
        _sync(draft)
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    part.unlink()


def _remux(part: Path, draft: Path, settings: VideoSettings) -> None:
    """Copy all packets of ``part`` to ``draft`` with the index at its start and the first frame at time 0."""
    av = load_av()
    shift, ticks_per_s = _clock_of(part)
    options = {"movflags": "+faststart+use_metadata_tags", "video_track_timescale": str(ticks_per_s)}
    with (
        av.open(str(part)) as source,
        av.open(str(draft), "w", format="mp4", container_options=options) as output,
    ):
        output.metadata.update(settings.metadata)
        streams = {item.index: _copy_stream(output, item) for item in source.streams}
        frame_s = 1 / settings.fps
        for packet in whole_packets(source, *source.streams):
            offset = round(shift / packet.time_base)
            packet.pts -= offset
            packet.dts -= offset
            if packet.stream.type == "video":
                packet.duration = round(frame_s / packet.time_base)
            packet.stream = streams[packet.stream.index]
            output.mux(packet)


def _copy_stream(output: Any, template: Any) -> Any:
    """Add a stream like ``template`` to ``output``, its tags included."""
    stream = output.add_stream_from_template(template, opaque=True)
    if template.type == "video":
        tag_bt709(stream.codec_context)
        if template.codec_context.name == "hevc":
            stream.codec_context.codec_tag = "hvc1"
    return stream


def _clock_of(part: Path) -> tuple[Fraction, int]:
    """Return the time of the first frame of ``part``, not 0 where frames are reordered, and its ticks a second."""
    with load_av().open(str(part)) as source:
        stream = source.streams.video[0]
        first = next(whole_packets(source, stream), None)
        start = Fraction(0) if first is None else first.pts * stream.time_base
        return start, stream.time_base.denominator


def _verify(draft: Path, settings: VideoSettings, shape: VideoShape) -> None:
    """Raise WriteError unless ``draft`` holds what was asked for."""
    found = probe_video(draft)
    length_s = float(shape.frames / settings.fps)
    frame_s = float(1 / settings.fps)
    size = VideoShape(found.frames, found.height, found.width)
    if (
        size != shape
        or found.codec != settings.codec
        or abs(found.duration_s - length_s) > frame_s / 2
        or found.has_audio != (settings.audio is not None)
    ):
        raise WriteError(
            "the finished video is not what was written to it",
            need=f"{settings.codec} {shape}, {length_s:.3f} s",
            have=f"{found.codec} {size}, {found.duration_s:.3f} s",
            remedy="Please report this with the settings used.",
        )


def _sync(path: Path) -> None:
    """Wait until the bytes of ``path`` are on the disk."""
    with open(path, "r+b") as file:
        os.fsync(file.fileno())
