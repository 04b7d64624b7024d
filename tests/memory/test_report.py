"""Reports say what was planned, what was measured, and how."""

from __future__ import annotations

import json

from lowmem_core.memory import MemoryReport, PhaseReport, format_table
from lowmem_core.units import GiB, MiB

DENOISE = PhaseReport("denoise", 3 * GiB, 2 * GiB, "cuda", 61.5)
DECODE = PhaseReport("decode", 400 * MiB, None, None, 2.25)


def test_a_report_sums_up_its_phases() -> None:
    """Peaks are the largest; a peak over phases that were not all measured is unknown."""
    both = MemoryReport((DENOISE, DECODE))
    assert (both.planned_peak_bytes, both.measured_peak_bytes, both.measured_by) == (3 * GiB, None, "cuda")
    assert both.seconds == 63.75
    assert MemoryReport((DENOISE,)).measured_peak_bytes == 2 * GiB
    assert MemoryReport(()).to_dict()["measured_by"] is None


def test_a_report_is_ready_for_json() -> None:
    """Unmeasured figures stay null."""
    read = json.loads(json.dumps(MemoryReport((DENOISE, DECODE)).to_dict()))
    assert read["phases"][1]["measured_peak_bytes"] is None
    assert read["phases"][0]["name"] == "denoise"


def test_a_table_is_aligned() -> None:
    """Names to the left, figures to the right, a dash where nothing was measured."""
    lines = format_table([DENOISE, DECODE]).splitlines()
    assert lines == [
        "phase      planned  measured    by  seconds",
        "denoise   3.00 GiB  2.00 GiB  cuda    61.50",
        "decode   400.0 MiB         -     -     2.25",
    ]
    assert str(MemoryReport((DENOISE, DECODE))).splitlines() == lines
