"""Benchmarks that have a tiny mode run, and find what their records say at real size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
STOCK, ONE_PASS, IN_STEP = "stock", "lean, one pass at a time", "lean, both passes in step"


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Every case of the tiny run of ``denoise_memory``: forwards, then whole denoises."""
    command = [sys.executable, str(ROOT / "benchmarks" / "denoise_memory.py"), "--tiny"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    facts = json.loads(done.stdout)
    return [*facts["activations"].values(), *facts["whole_denoise"].values()]


def test_lean_passes_take_less_than_stock_ones(rows: list[dict[str, Any]]) -> None:
    """One pass takes least, passes in step a little more, and diffusers' single pass most."""
    for row in rows:
        one_pass, in_step, stock = (row[what]["measured_bytes"] for what in (ONE_PASS, IN_STEP, STOCK))
        assert one_pass < in_step < stock


def test_no_run_takes_more_than_was_planned_or_allowed(rows: list[dict[str, Any]]) -> None:
    """Measured <= planned <= budget, for forwards and for whole denoises."""
    planned = [row[what] for row in rows for what in (ONE_PASS, IN_STEP)]
    assert len(planned) == 2 * len(rows) == 8
    for row in planned:
        assert row["measured_bytes"] <= row["planned_bytes"]
        assert row["planned_bytes"] <= (row.get("budget_bytes") or row["planned_bytes"])


def test_passes_in_step_bring_each_block_once(rows: list[dict[str, Any]]) -> None:
    """Half the bytes cross the bus."""
    runs = [row for row in rows if "streamed_bytes" in row[IN_STEP]]
    assert len(runs) == 1
    for row in runs:
        assert row[ONE_PASS]["streamed_bytes"] == 2 * row[IN_STEP]["streamed_bytes"]


def test_the_record_reaches_its_goals() -> None:
    """What is written down for real sizes keeps the plan, and reserves at most 5 % more than it allocates."""
    record = json.loads((ROOT / "benchmarks" / "records" / "denoise_memory.json").read_text(encoding="utf-8"))
    for row in record["activations"].values():
        assert row[ONE_PASS]["measured_bytes"] <= row[ONE_PASS]["planned_bytes"] <= row["goal_bytes"]
    for row in record["whole_denoise"].values():
        for what, goal in row["goal_bytes"].items():
            assert row[what]["measured_bytes"] <= row[what]["planned_bytes"] <= goal
            assert row[what]["reserved_over_allocated"] <= 1.05


def test_the_speed_benchmark_runs_on_a_processor() -> None:
    """What is timed on a GPU gives equal bits, and a ratio against each baseline, at tiny size."""
    command = [sys.executable, str(ROOT / "benchmarks" / "denoise_speed.py"), "--tiny"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    for row in json.loads(done.stdout)["sizes"].values():
        assert row["bits_equal"]
        assert row["stream_over_floor"] > 0
        assert row["stream_over_group_offload"] > 0
        assert row["peak_bytes"]["stream"] <= row["planned_bytes"]["stream"]
