"""How many bytes a run may use, by kind of memory."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..errors import RequestError
from ..units import format_bytes


@dataclass(frozen=True)
class MemoryBudget:
    """Upper bounds of a run; None means unlimited.

    Attributes:
        device_bytes: Weights and activations on the device that computes.
        pinned_bytes: Page-locked host memory, counted apart from ``host_bytes``.
        host_bytes: Pageable host memory that LowMem allocates itself.
    """

    device_bytes: int | None = None
    pinned_bytes: int | None = None
    host_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            limit = getattr(self, field.name)
            if limit is not None and limit <= 0:
                raise RequestError(
                    f"{field.name} cannot be a limit",
                    need="a positive number of bytes, or None for no limit",
                    have=format_bytes(limit),
                    remedy="Leave the limit out if this memory should not be bounded.",
                )
