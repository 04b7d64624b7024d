"""How every benchmark writes down what it measured: with its command, commit, machine and versions."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parent / "records"


def write_record(
    name: str, facts: dict[str, Any], *, machine: str = "", versions: tuple[str, ...] = ("torch",)
) -> Path:
    """Write ``records/<name>.json`` and return its path.

    Args:
        name: The benchmark's module name.
        facts: What it measured.
        machine: What to say of the machine beside its architecture and cores.
        versions: Packages whose versions matter.
    """
    command = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    about = ", ".join(filter(None, (f"{platform.machine()}, {os.cpu_count()} cores", machine)))
    record = {
        "command": f"python benchmarks/{name}.py",
        "commit": commit,
        "machine": about,
        "versions": {package: importlib.metadata.version(package) for package in versions},
        **facts,
    }
    path = RECORDS / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
