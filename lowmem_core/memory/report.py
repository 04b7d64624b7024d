"""What a run planned to use and what it was measured to use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..units import format_bytes


@dataclass(frozen=True)
class PhaseReport:
    """One phase of a run.

    Attributes:
        name: The phase, such as "denoise" or "decode".
        planned_peak_bytes: The most device bytes the plan allows.
        measured_peak_bytes: The most device bytes seen, or None if nothing measured.
        measured_by: The meter's method, or None if nothing measured.
        seconds: How long the phase took.
        moved_bytes: Weight bytes that were brought to the device.
        allocated_bytes: Device bytes in use when the phase ended, or None if nothing measured.
        reserved_bytes: Device bytes that the allocator held then, or None where there is none.
    """

    name: str
    planned_peak_bytes: int
    measured_peak_bytes: int | None = None
    measured_by: str | None = None
    seconds: float = 0.0
    moved_bytes: int = 0
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None

    def line(self) -> str:
        """Return the phase as one line of a log."""
        facts = (
            ("moved", self.moved_bytes),
            ("allocated", self.allocated_bytes),
            ("reserved", self.reserved_bytes),
            ("peak", self.measured_peak_bytes),
            ("planned", self.planned_peak_bytes),
        )
        figures = "  ".join(f"{name} {'-' if value is None else format_bytes(value)}" for name, value in facts)
        return f"{self.name:<8}  {figures}  {self.seconds:.2f} s"


@dataclass(frozen=True)
class MemoryReport:
    """The phases of a run, in order."""

    phases: tuple[PhaseReport, ...]

    @property
    def planned_peak_bytes(self) -> int:
        """The largest planned peak of all phases."""
        return max((phase.planned_peak_bytes for phase in self.phases), default=0)

    @property
    def measured_peak_bytes(self) -> int | None:
        """The largest measured peak, or None unless every phase was measured."""
        peaks = [phase.measured_peak_bytes for phase in self.phases]
        known = [peak for peak in peaks if peak is not None]
        return max(known) if known and len(known) == len(peaks) else None

    @property
    def measured_by(self) -> str | None:
        """The methods that measured, joined by "+", or None if nothing did."""
        methods = dict.fromkeys(phase.measured_by for phase in self.phases if phase.measured_by is not None)
        return "+".join(methods) or None

    @property
    def seconds(self) -> float:
        """The time of all phases together."""
        return sum(phase.seconds for phase in self.phases)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {
            "planned_peak_bytes": self.planned_peak_bytes,
            "measured_peak_bytes": self.measured_peak_bytes,
            "measured_by": self.measured_by,
            "seconds": self.seconds,
            "phases": [asdict(phase) for phase in self.phases],
        }

    def __str__(self) -> str:
        return format_table(self.phases)


def format_table(rows: Sequence[PhaseReport]) -> str:
    """Return the phases as aligned text: names to the left, figures to the right."""
    cells = [("phase", "planned", "measured", "by", "seconds"), *(_cells(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join(_aligned(row, widths) for row in cells)


def _cells(row: PhaseReport) -> tuple[str, str, str, str, str]:
    measured = "-" if row.measured_peak_bytes is None else format_bytes(row.measured_peak_bytes)
    return row.name, format_bytes(row.planned_peak_bytes), measured, row.measured_by or "-", f"{row.seconds:.2f}"


def _aligned(row: tuple[str, ...], widths: list[int]) -> str:
    first = row[0].ljust(widths[0])
    return "  ".join([first, *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
