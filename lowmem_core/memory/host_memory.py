"""How much host memory can still be used."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_FIELD = "MemAvailable:"


def available_host_bytes() -> int | None:
    """Return the bytes that can be allocated without swapping, or None where the system does not tell."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return _asked_of_psutil()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(_FIELD)), None)


def _asked_of_psutil() -> int | None:
    try:
        import psutil
    except ImportError:
        return None
    return int(psutil.virtual_memory().available)
