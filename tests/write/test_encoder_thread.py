"""The queue between decoding and encoding is bounded, ordered, and passes errors both ways."""

from __future__ import annotations

import threading

import pytest
import torch

from lowmem_core.frames import FrameChunk
from lowmem_core.write.encoder_thread import CAPACITY, EncoderThread


class Recorder:
    """A sink that waits for leave before each chunk."""

    def __init__(self) -> None:
        self.leave = threading.Semaphore(0)
        self.seen: list[int] = []
        self.ended: list[str] = []
        self.thread_names: set[str] = set()

    def write(self, chunk: FrameChunk) -> None:
        """Note the chunk, once allowed."""
        self.leave.acquire()
        self.thread_names.add(threading.current_thread().name)
        self.seen.append(chunk.first_frame)

    def close(self) -> None:
        """Note the end."""
        self.ended.append("close")

    def abort(self) -> None:
        """Note the failure."""
        self.ended.append("abort")


class Failing(Recorder):
    """A sink that fails at the first chunk."""

    def write(self, chunk: FrameChunk) -> None:
        """Fail."""
        raise OSError("broken")


class StopError(Exception):
    """Raised by the interrupt of these tests."""


def chunk(first: int) -> FrameChunk:
    """Return a chunk of one tiny frame."""
    return FrameChunk(torch.zeros(1, 2, 2, 3), first)


def put_all(thread: EncoderThread, count: int) -> None:
    """Put ``count`` chunks."""
    for first in range(count):
        thread.put(chunk(first))


def wait_forever() -> None:
    """Do nothing, as an interrupt that never stops."""


def stop_at_once() -> None:
    """Stop as soon as asked."""
    raise StopError


def test_the_caller_goes_on_while_the_sink_works() -> None:
    """Chunks are taken without waiting for the sink, which works elsewhere, until the queue is full."""
    sink = Recorder()
    thread = EncoderThread(sink, wait_forever)
    for first in range(CAPACITY):
        thread.put(chunk(first))
    assert sink.seen == []
    sink.leave.release(CAPACITY)
    thread.finish()
    assert list(range(CAPACITY)) == sink.seen
    assert sink.ended == ["close"]
    assert sink.thread_names == {"lowmem-encoder"}


def test_a_full_queue_makes_the_caller_wait_and_ask_the_interrupt() -> None:
    """Memory is bounded: beyond the queue the caller waits, and can be stopped there."""
    sink = Recorder()
    thread = EncoderThread(sink, stop_at_once)
    with pytest.raises(StopError):
        put_all(thread, CAPACITY + 2)
    sink.leave.release(CAPACITY + 2)
    thread.stop()
    assert len(sink.seen) in (CAPACITY, CAPACITY + 1)


def test_a_failing_sink_stops_the_caller() -> None:
    """The sink's own error is raised by a later put, and the sink lets go once."""
    sink = Failing()
    thread = EncoderThread(sink, wait_forever)
    with pytest.raises(OSError, match="broken"):
        put_all(thread, 100)
    thread.stop()
    assert sink.ended == ["abort"]


def test_a_failure_after_the_last_chunk_is_raised_by_finish() -> None:
    """No error is lost because nothing was put after it."""
    thread = EncoderThread(Failing(), wait_forever)
    thread.put(chunk(0))
    with pytest.raises(OSError, match="broken"):
        thread.finish()


def test_stop_finishes_what_was_queued() -> None:
    """After an error of the caller the frames already made are still encoded."""
    sink = Recorder()
    thread = EncoderThread(sink, wait_forever)
    thread.put(chunk(0))
    thread.put(chunk(1))
    sink.leave.release(2)
    thread.stop()
    assert (sink.seen, sink.ended) == ([0, 1], ["close"])
