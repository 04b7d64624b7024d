"""What importing the core adds to importing torch, and what the pack adds to the start of a ComfyUI server.

Run ``COMFYUI_PATH=... python benchmarks/start_time.py`` in an environment with ComfyUI's requirements: about two
minutes. Every figure is of fresh processes; servers with and without the pack take turns. It writes
``benchmarks/records/start_time.json``.
"""

from __future__ import annotations

import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from recording import write_record

ROOT = Path(__file__).resolve().parents[1]
IMPORT_RUNS, SERVER_RUNS = 7, 5
START_S = 300.0
MODULES = ("lowmem_core", "lowmem_core.pipeline", "lowmem_core.cli")
TIMER = """
import sys, time
start = time.perf_counter()
import torch
middle = time.perf_counter()
__import__(sys.argv[1])
print(middle - start, time.perf_counter() - middle)
"""
FLAGS = ["--cpu", "--disable-auto-launch", "--disable-api-nodes", "--database-url=sqlite:///:memory:"]
FLAGS += ["--disable-all-custom-nodes", "--whitelist-custom-nodes=lowmem"]


def import_seconds(module: str) -> list[float]:
    """Return the seconds of ``import torch``, and those of importing ``module`` after it, in a fresh process."""
    command = [sys.executable, "-c", TIMER, module]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.split()]


def measure_imports() -> dict[str, Any]:
    """Return milliseconds: medians and spread, torch alone as the baseline."""
    torch_s: list[float] = []
    beyond_s: dict[str, list[float]] = {module: [] for module in MODULES}
    for _ in range(IMPORT_RUNS):
        for module in MODULES:
            alone, beyond = import_seconds(module)
            torch_s.append(alone)
            beyond_s[module].append(beyond)
    return {
        "runs": IMPORT_RUNS,
        "torch_alone_ms": _milliseconds(torch_s),
        "beyond_torch_ms": {module: _milliseconds(seconds) for module, seconds in beyond_s.items()},
    }


def _milliseconds(seconds: list[float]) -> dict[str, float]:
    """Return the median and the extremes."""
    named = {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}
    return {name: round(1000 * value, 2) for name, value in named.items()}


def start_server(comfyui: Path, has_pack: bool) -> dict[str, float]:
    """Start a server in an empty base directory; return seconds until it answers, processor seconds, its own figure."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        base = Path(folder)
        (base / "custom_nodes").mkdir()
        if has_pack:
            (base / "custom_nodes" / "lowmem").symlink_to(ROOT, target_is_directory=True)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        log = base / "server.log"
        command = [sys.executable, "main.py", *FLAGS, "--port", str(port), "--base-directory", str(base)]
        with log.open("wb") as output:
            started = time.perf_counter()
            process = subprocess.Popen(command, cwd=comfyui, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_until_ready(process, port)
            wall_s = time.perf_counter() - started
            used = psutil.Process(process.pid).cpu_times()
        finally:
            process.kill()
            process.wait()
        row = {"wall_s": round(wall_s, 2), "processor_s": round(used.user + used.system, 2)}
        printed = re.search(r"([\d.]+) seconds.*lowmem", log.read_text(errors="replace"))
        return row | ({"printed_import_s": float(printed[1])} if printed else {})


def wait_until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    """Return when the server answers."""
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/system_stats", timeout=30):
                return
        except OSError:
            time.sleep(0.02)
    raise SystemExit("the server did not start")


def measure_servers(comfyui: Path) -> dict[str, Any]:
    """Start servers without and with the pack in turn; return all runs and the differences of medians."""
    start_server(comfyui, has_pack=True)
    rows: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    for _ in range(SERVER_RUNS):
        for name, runs in rows.items():
            runs.append(start_server(comfyui, has_pack=name == "with"))
    added = {
        key: round(
            statistics.median(r[key] for r in rows["with"]) - statistics.median(r[key] for r in rows["without"]), 2
        )
        for key in ("wall_s", "processor_s")
    }
    version = re.search(r'"(.+)"', (comfyui / "comfyui_version.py").read_text())
    return {
        "host": f"ComfyUI {version[1] if version else 'unknown'}",
        "baseline": "without",
        "runs": rows,
        "added": added,
        "printed_import_s": statistics.median(row["printed_import_s"] for row in rows["with"]),
    }


def main() -> None:
    """Measure and write the record."""
    comfyui = os.environ.get("COMFYUI_PATH")
    if comfyui is None:
        raise SystemExit("set COMFYUI_PATH to a ComfyUI checkout")
    facts = {"imports": measure_imports(), "server_start": measure_servers(Path(comfyui).resolve())}
    write_record("start_time", facts, machine="no GPU")
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
