"""Frames in, one finished MP4 out.

Two orders of events matter. The target must be whole or as before, so the video grows in a part next to it
that replaces it at the very end. And what was encoded must survive any end of the process, so the part is
fragmented and can be played at all times; see ``part_writer``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from ..errors import LowmemError, RequestError, WriteError
from ..frames import FrameChunk
from ..host import Interrupt, NeverInterrupt
from ._av import file_errors
from .checks import ChunkOrder
from .encoder_thread import EncoderThread
from .encoders import find_encoder
from .finish import finish_file
from .part import check_target
from .part_writer import PartWriter
from .probe import probe_video
from .settings import VideoSettings

_log = logging.getLogger(__name__)


def write_mp4(
    chunks: Iterable[FrameChunk],
    path: Path,
    settings: VideoSettings,
    *,
    expected_frames: int | None = None,
    interrupt: Interrupt | None = None,
) -> Path:
    """Write a video, encoding in a thread while ``chunks`` produces the next frames in this one.

    Args:
        chunks: Consecutive chunks from frame 0 on, ``[F, H, W, 3]`` float RGB in 0..1 on the CPU, all of one even
            size. A generator is closed in every case. A chunk's frames must not be changed once yielded.
        path: The target, ``*.mp4`` in an existing folder; a file there is replaced at the very end.
        settings: How to encode.
        expected_frames: Length of the video; more or fewer frames are an error. None allows any.
        interrupt: Asked between chunks and while waiting for the encoder.

    Returns:
        ``path``.

    Raises:
        RequestError: The frames, the target or the encoder cannot work.
        WriteError: The file could not be written; ``partial_path`` is the playable part, if one was kept.
        MissingDependencyError: PyAV is not installed.

    Whatever ``chunks`` or ``interrupt`` raise passes unchanged. If frames were encoded by then, they stay playable
    in ``<stem>.partial.mp4`` next to the target, and the log says so, unless ``settings.keep_partial`` is off.
    """
    path = Path(path)
    with _closing(chunks) as stream:
        find_encoder(settings)
        check_target(path)
        order = ChunkOrder(expected_frames)
        writer = PartWriter(path, settings)
        check = (interrupt or NeverInterrupt()).check
        thread = EncoderThread(writer, check)
        try:
            for chunk in stream:
                check()
                order.accept(chunk)
                thread.put(chunk)
                del chunk
            check()
            shape = order.finished()
            thread.finish()
            finish_file(_part_of(writer), path, settings, shape)
        except BaseException as error:
            thread.stop()
            _fail(error, _keep(writer.path, settings.keep_partial))
    return path


@contextmanager
def _closing(chunks: Iterable[FrameChunk]) -> Iterator[Iterator[FrameChunk]]:
    """Iterate ``chunks``, and close the iterator at the end if it can be closed."""
    stream = iter(chunks)
    try:
        yield stream
    finally:
        close = getattr(stream, "close", None)
        if close is not None:
            close()


def _part_of(writer: PartWriter) -> Path:
    """Return the part, which exists once a frame was written."""
    if writer.path is None:
        raise WriteError("no frame reached the encoder", remedy="Please report this.")
    return writer.path


def _keep(part: Path | None, keep: bool) -> tuple[Path, int] | None:
    """Return the part and its playable frames, or remove it and return None if it is not worth keeping."""
    if part is None or not part.exists():
        return None
    frames = _playable_frames(part) if keep else 0
    if frames:
        return part, frames
    part.unlink()
    return None


def _playable_frames(part: Path) -> int:
    """Return how many frames of an unfinished file can be played."""
    try:
        return probe_video(part).frames
    except RequestError as error:
        _log.debug("nothing to keep in %s: %s", part, error)
        return 0


def _fail(error: BaseException, kept: tuple[Path, int] | None) -> NoReturn:
    """Raise ``error`` as callers should see it, and tell where the part is."""
    place = f"The first {kept[1]} frames are in {kept[0]}." if kept else ""
    path = kept[0] if kept else None
    if isinstance(error, (RequestError, WriteError)) and place:
        raise _with_place(error, place, path) from error
    if isinstance(error, file_errors()):
        raise WriteError(
            "the video could not be written",
            need="space and permission in its folder, and settings that the encoder takes",
            have=str(error),
            remedy=place or "No part was kept.",
            partial_path=path,
        ) from error
    if place and not isinstance(error, GeneratorExit):
        _log.warning("The video was not finished. %s", place)
    raise error


def _with_place(error: LowmemError, place: str, part: Path | None) -> LowmemError:
    """Return ``error`` with the place of the part in its text."""
    remedy = f"{error.remedy} {place}".strip()
    if isinstance(error, WriteError):
        return WriteError(error.problem, need=error.need, have=error.have, remedy=remedy, partial_path=part)
    return type(error)(error.problem, need=error.need, have=error.have, remedy=remedy)
