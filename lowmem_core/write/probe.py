"""What is in a video file, read from its packets without decoding them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from ..errors import RequestError
from ._av import file_errors, load_av

_CONTAINER_TAGS = {"major_brand", "minor_version", "compatible_brands", "encoder"}


@dataclass(frozen=True)
class VideoProbe:
    """Facts about one video file.

    Attributes:
        frames: Number of whole frames.
        height: Pixels.
        width: Pixels.
        fps: Frames per second.
        duration_s: Seconds from the start of the first frame to the end of the last.
        codec: ``"h264"``, ``"hevc"``, ``"av1"`` or another name of FFmpeg's.
        bit_depth: Bits per sample.
        has_audio: Whether there is sound.
        metadata: The container's tags, without those that the MP4 format adds itself.
    """

    frames: int
    height: int
    width: int
    fps: Fraction
    duration_s: float
    codec: str
    bit_depth: int
    has_audio: bool
    metadata: Mapping[str, str]


def probe_video(path: Path) -> VideoProbe:
    """Read the facts of the video at ``path``; a file that was cut off is read up to the cut.

    Raises:
        RequestError: The file does not exist, or holds no video that can be read.
    """
    try:
        with load_av().open(str(path)) as container:
            if not container.streams.video:
                raise _unreadable(path, "no video stream")
            return _probe(container)
    except file_errors() as error:
        raise _unreadable(path, str(error)) from error


def whole_packets(container: Any, *streams: Any) -> Iterator[Any]:
    """Yield the undamaged packets of ``streams`` of an open ``av`` input, up to where the file was cut off."""
    packets = container.demux(*streams)
    while True:
        try:
            packet = next(packets, None)
        except load_av().error.InvalidDataError:
            return
        if packet is None:
            return
        if packet.dts is not None and not packet.is_corrupt:
            yield packet


def _probe(container: Any) -> VideoProbe:
    """Return the facts of an open ``av`` input with a video stream."""
    stream = container.streams.video[0]
    context = stream.codec_context
    frames, start, end = 0, None, 0
    for packet in whole_packets(container, stream):
        frames += 1
        start = packet.pts if start is None else min(start, packet.pts)
        end = max(end, packet.pts + (packet.duration or 0))
    return VideoProbe(
        frames=frames,
        height=context.height,
        width=context.width,
        fps=Fraction(stream.average_rate or stream.guessed_rate or 0),
        duration_s=float((end - (start or 0)) * stream.time_base) if frames else 0.0,
        codec=_codec_name(context),
        bit_depth=context.format.components[0].bits if context.format else 0,
        has_audio=bool(container.streams.audio),
        metadata={key: text for key, text in container.metadata.items() if key not in _CONTAINER_TAGS},
    )


def _codec_name(context: Any) -> str:
    """Return the codec's own name, also where a decoder such as libdav1d has another."""
    return "av1" if "av1" in context.name or "dav1d" in context.name else str(context.name)


def _unreadable(path: Path, have: str) -> RequestError:
    """Return the error for a file that is no video."""
    return RequestError(
        "cannot read the video",
        need=f"a video file at {path}",
        have=have,
        remedy="Check the path, and that the file was written to its end.",
    )
