"""The memory of the whole process, as the operating system sees it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..errors import MissingDependencyError
from ..units import KiB

if TYPE_CHECKING:
    import torch

STATUS = Path("/proc/self/status")
SAMPLE_SECONDS = 0.01


class ProcessMemory(NamedTuple):
    """One reading.

    Attributes:
        anonymous_bytes: Memory that cannot be dropped: anonymous and shared pages, which page-locked buffers are too.
        file_bytes: Resident pages of mapped files, which the system may drop; None where it is not told apart.
    """

    anonymous_bytes: int
    file_bytes: int | None


def read_process_memory() -> ProcessMemory:
    """Read the memory of this process now.

    Raises:
        MissingDependencyError: The system has no ``/proc/self/status`` with these figures and psutil is missing.
    """
    if STATUS.exists():
        found = _parse_status(STATUS.read_text(encoding="ascii", errors="replace"))
        if found is not None:
            return found
    try:
        import psutil
    except ImportError as error:
        raise MissingDependencyError(
            "process memory cannot be read on this system",
            need="the psutil package",
            remedy="Install it with `pip install psutil`.",
        ) from error
    return ProcessMemory(int(psutil.Process().memory_info().rss), None)


def _parse_status(text: str) -> ProcessMemory | None:
    """Return the figures of a ``/proc/self/status``, or None if the kernel does not give them."""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    if not {"RssAnon", "RssFile", "RssShmem"} <= fields.keys():
        return None
    sizes = {name: int(fields[name].split()[0]) * KiB for name in ("RssAnon", "RssFile", "RssShmem")}
    return ProcessMemory(sizes["RssAnon"] + sizes["RssShmem"], sizes["RssFile"])


class ProcessMeter:
    """Samples anonymous resident memory on demand and, inside ``measuring``, from a thread.

    The process is one: device and host figures are the same, and what other code in it allocates counts too. A rise
    shorter than the sampling interval may be missed.

    Args:
        sample_seconds: The time between samples.
    """

    measured_by: str | None = "rss"
    reserved_bytes: int | None = None

    def __init__(self, sample_seconds: float = SAMPLE_SECONDS) -> None:
        self._sample_seconds = sample_seconds
        self._lock = threading.Lock()
        self._entered = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._peak = 0
        self.sample()

    @property
    def live_bytes(self) -> int:
        """Anonymous bytes now."""
        return self.sample().anonymous_bytes

    @property
    def peak_bytes(self) -> int:
        """The most anonymous bytes in any sample since the last reset."""
        self.sample()
        return self._peak

    @property
    def host_live_bytes(self) -> int:
        """The same as ``live_bytes``."""
        return self.live_bytes

    @property
    def host_peak_bytes(self) -> int:
        """The same as ``peak_bytes``."""
        return self.peak_bytes

    @property
    def file_bytes(self) -> int | None:
        """Resident bytes of mapped files now, which are in no other figure; None if not told apart."""
        return self.sample().file_bytes

    def sample(self) -> ProcessMemory:
        """Read the memory now and let it count for the peak."""
        reading = read_process_memory()
        with self._lock:
            self._peak = max(self._peak, reading.anonymous_bytes)
        return reading

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Sample from a thread while any thread is inside."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def host_allocation(self) -> AbstractContextManager[None]:
        """Do nothing: the process is one."""
        return nullcontext()

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do nothing: they are in memory already."""

    def reset_peak(self) -> None:
        """Start the peak again from what is in use now."""
        with self._lock:
            self._peak = 0
        self.sample()

    def _enter(self) -> None:
        with self._lock:
            self._entered += 1
            if self._entered == 1:
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._watch, args=(self._stop,), name="lowmem-process-meter", daemon=True
                )
                self._thread.start()

    def _leave(self) -> None:
        self.sample()
        with self._lock:
            self._entered -= 1
            thread = self._thread if self._entered == 0 else None
            if thread is not None:
                self._stop.set()
        if thread is not None:
            thread.join()

    def _watch(self, stop: threading.Event) -> None:
        while not stop.wait(self._sample_seconds):
            self.sample()
