"""A thread that encodes while its caller decodes.

The caller waits when two chunks are queued, so memory stays bounded; the thread waits when none is. An error
on either side ends both: the thread's error is raised by the caller's next ``put``, and the caller's error
reaches the thread as ``stop``, after which it finishes what it was given so that the part ends cleanly.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ..frames import FrameChunk

CAPACITY = 2
_POLL_S = 0.1


class Sink(Protocol):
    """Where the thread puts chunks."""

    def write(self, chunk: FrameChunk) -> None:
        """Take one chunk."""

    def close(self) -> None:
        """Finish after the last chunk."""

    def abort(self) -> None:
        """Let go after a failure; raises nothing."""


class EncoderThread:
    """Feeds a sink from a bounded queue in a thread of its own.

    Args:
        sink: Used by the thread alone until it has ended.
        check: Called while the caller waits; may raise to interrupt it.
    """

    def __init__(self, sink: Sink, check: Callable[[], None]) -> None:
        self._sink = sink
        self._check = check
        self._queue: deque[FrameChunk] = deque()
        self._changed = threading.Condition()
        self._complete = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="lowmem-encoder", daemon=True)
        self._thread.start()

    def put(self, chunk: FrameChunk) -> None:
        """Queue ``chunk``, waiting while the queue is full; the caller must not change its frames afterwards.

        Raises:
            BaseException: Whatever the sink raised, or what ``check`` raised.
        """
        with self._changed:
            while len(self._queue) >= CAPACITY and self._error is None:
                self._changed.wait(_POLL_S)
                self._check()
            self._raise_error()
            self._queue.append(chunk)
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until everything is encoded and the sink is closed; raises like ``put``."""
        self._mark_complete()
        while self._thread.is_alive():
            self._thread.join(_POLL_S)
            self._check()
        self._raise_error()

    def stop(self) -> None:
        """Let the thread finish what was queued and wait for it; the sink's error is left aside."""
        self._mark_complete()
        self._thread.join()

    def _mark_complete(self) -> None:
        """Tell the thread that nothing more will come."""
        with self._changed:
            self._complete = True
            self._changed.notify_all()

    def _raise_error(self) -> None:
        """Raise what the sink raised, if it did."""
        if self._error is not None:
            raise self._error

    def _take(self) -> FrameChunk | None:
        """Return the next chunk, or None after the last."""
        with self._changed:
            while not self._queue and not self._complete:
                self._changed.wait()
            if not self._queue:
                return None
            chunk = self._queue.popleft()
            self._changed.notify_all()
            return chunk

    def _run(self) -> None:
        """Encode until the queue ends or the sink fails; the caller raises the failure."""
        try:
            while (chunk := self._take()) is not None:
                self._sink.write(chunk)
                del chunk
            self._sink.close()
        except BaseException as error:
            self._sink.abort()
            with self._changed:
                self._error = error
                self._queue.clear()
                self._changed.notify_all()
