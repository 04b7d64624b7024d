"""Byte quantities: constants, reading what users type, and one way of printing them."""

from __future__ import annotations

import re

from .errors import RequestError

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB

_SUFFIXES = {"": 1, "b": 1, "kib": KiB, "mib": MiB, "gib": GiB, "kb": 1000, "mb": 1000**2, "gb": 1000**3}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*\Z")


def format_bytes(nbytes: int) -> str:
    """Return ``nbytes`` as people read it: ``"1.20 GiB"``, ``"425.0 MiB"`` or ``"512 B"``."""
    if abs(nbytes) >= GiB:
        return f"{nbytes / GiB:.2f} GiB"
    if abs(nbytes) >= MiB:
        return f"{nbytes / MiB:.1f} MiB"
    if abs(nbytes) >= KiB:
        return f"{nbytes / KiB:.1f} KiB"
    return f"{nbytes} B"


def parse_bytes(text: str) -> int:
    """Read a byte quantity such as ``"1.2GiB"``, ``"800 MiB"``, ``"2GB"`` or ``"1048576"``.

    Raises:
        RequestError: The text is not a positive quantity with a known suffix.
    """
    match = _QUANTITY.match(text)
    factor = _SUFFIXES.get(match.group(2).lower()) if match else None
    nbytes = int(float(match.group(1)) * factor) if match and factor else 0
    if nbytes <= 0:
        raise RequestError(
            "cannot read the byte quantity",
            need="a positive number with B, KiB, MiB, GiB, KB, MB or GB",
            have=repr(text),
            remedy='Write for example "1.2GiB".',
        )
    return nbytes
