"""Encodes frames into a fragmented MP4 that can be played up to its last flushed fragment.

The encoder must not hold frames back for long, or a kill costs them; the muxer must not wait for the slower
of two streams, or both are lost. So the encoder's delay is bounded (``encoders.Latency``), fragments are a
quarter of a second, every packet is flushed, and the sound is fed just ahead of the pictures.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..frames import FrameChunk
from ._av import file_errors, load_av
from .audio import AudioFeeder
from .checks import check_finite
from .colour import ColourConverter
from .encoders import Latency, add_video_stream
from .part import PartFile
from .settings import VideoSettings

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

_MICROSECONDS = 1_000_000
_BUFFER_BYTES = 1 << 20


class PartWriter:
    """Writes the unfinished file of one video; used by one thread.

    The file is created with the first chunk, once all of that chunk is known to be good.

    Args:
        target: Where the finished video will be; the part lies next to it.
        settings: How to encode.

    Attributes:
        frames: Frames handed to the encoder so far.
    """

    def __init__(self, target: Path, settings: VideoSettings) -> None:
        self._target = target
        self._settings = settings
        self._converter = ColourConverter(settings.fps, settings.bit_depth)
        self._file: PartFile | None = None
        self._container: Any = None
        self._video: Any = None
        self._audio: AudioFeeder | None = None
        self._broken = False
        self.frames = 0

    @property
    def path(self) -> Path | None:
        """The part, or None while there is none."""
        return self._file.path if self._file else None

    def write(self, chunk: FrameChunk) -> None:
        """Encode the frames of ``chunk``.

        Raises:
            RequestError: One of them holds NaN or infinity; none of the chunk was encoded.
            OSError: The file could not be written.
            av.FFmpegError: The encoder failed.
        """
        check_finite(chunk)
        self._broken = True
        if self._container is None:
            self._open(int(chunk.frames.shape[1]), int(chunk.frames.shape[2]))
        for pixels in chunk.frames:
            self._encode(pixels)
        self._broken = False

    def close(self) -> None:
        """Write what the encoders still hold, and close the file."""
        if self._file is None:
            return
        self._broken = True
        if self._audio is not None:
            self._container.mux(self._audio.flush())
        self._mux_video(self._video.encode(None))
        self._container.close()
        self._file.close()

    def abort(self) -> None:
        """Close the file after a failure: with all frames if the frames were at fault, else as it is."""
        if self._file is None:
            return
        failures: tuple[type[Exception], ...] = (*file_errors(), ValueError)
        try:
            if not self._broken:
                self.close()
            self._file.close()
            if self._container is not None:
                self._container.close()
        except failures as error:
            _log.debug("closing %s after a failure: %s", self._file.path, error)
        self._file.close()

    def _open(self, height: int, width: int) -> None:
        """Create the part and write its header."""
        settings = self._settings
        latency = Latency.of(settings.fps)
        fragment_us = int((latency.fragment - 0.5) / settings.fps * _MICROSECONDS)
        self._file = PartFile.beside(self._target)
        self._container = load_av().open(
            self._file,
            "w",
            format="mp4",
            buffer_size=_buffer_bytes(settings),
            container_options={
                "movflags": "+frag_keyframe+empty_moov+delay_moov+default_base_moof+use_metadata_tags",
                "frag_duration": str(fragment_us),
                "flush_packets": "1",
            },
        )
        self._container.metadata.update(settings.metadata)
        self._video = add_video_stream(self._container, settings, height, width)
        if settings.audio is not None:
            self._audio = AudioFeeder(self._container, settings.audio, settings.fps)
        self._container.start_encoding()

    def _encode(self, pixels: torch.Tensor) -> None:
        """Encode one frame, ``[H, W, 3]``, and the sound up to its end."""
        frame = self._converter.convert(pixels, self.frames)
        self.frames += 1
        if self._audio is not None:
            self._container.mux(self._audio.up_to_frame(self.frames))
        self._mux_video(self._video.encode(frame))

    def _mux_video(self, packets: list[Any]) -> None:
        """Write video packets, each one frame long."""
        for packet in packets:
            packet.duration = round(1 / (self._settings.fps * packet.time_base))
            self._container.mux(packet)


def _buffer_bytes(settings: VideoSettings) -> int:
    """Return a buffer that holds the whole header: its sizes are filled in last, and the file only grows."""
    tags = sum(len(key.encode()) + len(text.encode()) for key, text in settings.metadata.items())
    return _BUFFER_BYTES + 2 * tags
