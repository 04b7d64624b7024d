"""The phases of a run as they end: bytes moved, in use and at the worst moment, and seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .meter import MemoryMeter
from .report import MemoryReport, PhaseReport


@dataclass
class OpenPhase:
    """A phase that has not ended.

    Attributes:
        moved_bytes: Weight bytes that it has brought to the device.
    """

    moved_bytes: int = 0


class PhaseLog:
    """Measures phases one after the other.

    Args:
        meter: Its peak is started again with each phase.
        on_phase: Told of each phase that ended without an error.
    """

    def __init__(self, meter: MemoryMeter, on_phase: Callable[[PhaseReport], None] | None = None) -> None:
        self._meter = meter
        self._on_phase = on_phase
        self._phases: list[PhaseReport] = []

    @property
    def report(self) -> MemoryReport:
        """The phases so far."""
        return MemoryReport(tuple(self._phases))

    @contextmanager
    def phase(self, name: str, planned_peak_bytes: int) -> Iterator[OpenPhase]:
        """Measure a phase while the context lasts."""
        meter, started, opened = self._meter, time.perf_counter(), OpenPhase()
        meter.reset_peak()
        yield opened
        phase = PhaseReport(
            name,
            planned_peak_bytes,
            meter.peak_bytes,
            meter.measured_by,
            time.perf_counter() - started,
            opened.moved_bytes,
            meter.live_bytes,
            meter.reserved_bytes,
        )
        self._phases.append(phase)
        if self._on_phase is not None:
            self._on_phase(phase)
