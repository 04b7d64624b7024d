"""Every error LowMem raises on purpose, as one tree.

LowmemError
|-- RequestError            an argument, a latent or a file name that cannot work (also a ValueError)
|-- CheckpointError         a weight file that is damaged, incomplete or of another model
|-- BudgetError             a plan that does not fit, raised before anything is loaded
|-- BudgetExceededError     live bytes passed the limit during a run: a defect of ours
|-- DeviceMemoryError       the device ran out and every smaller step was tried
|-- NotFiniteError          a model gave NaN or infinity
|-- WriteError              a video file could not be finished
`-- MissingDependencyError  an optional package is not installed

Messages teach: what is wrong, then what is needed, what there is, and what to do.
"""

from __future__ import annotations

from pathlib import Path


class LowmemError(Exception):
    """Base of all deliberate errors.

    Args:
        problem: What went wrong, one sentence without a full stop.
        need: What would have worked.
        have: What was found.
        remedy: What the user can do.
    """

    def __init__(self, problem: str, *, need: str = "", have: str = "", remedy: str = "") -> None:
        self.problem, self.need, self.have, self.remedy = problem, need, have, remedy
        parts = [problem]
        parts += [f"{label} {text}" for label, text in (("need", need), ("have", have)) if text]
        message = "; ".join(parts) + "."
        super().__init__(f"{message} {remedy}".rstrip() if remedy else message)


class RequestError(LowmemError, ValueError):
    """An argument, a latent or a file name that cannot work."""


class CheckpointError(LowmemError):
    """A weight file that is damaged, incomplete or of another model."""


class BudgetError(LowmemError):
    """A plan that does not fit its budget, raised before anything is loaded.

    Attributes:
        smallest_bytes: The smallest device budget that works for this request, or None if unknown.
    """

    def __init__(
        self,
        problem: str,
        *,
        need: str = "",
        have: str = "",
        remedy: str = "",
        smallest_bytes: int | None = None,
    ) -> None:
        super().__init__(problem, need=need, have=have, remedy=remedy)
        self.smallest_bytes = smallest_bytes


class BudgetExceededError(LowmemError):
    """Live bytes passed the limit during a run."""


class DeviceMemoryError(LowmemError):
    """The device ran out of memory and every smaller step was tried."""


class NotFiniteError(LowmemError):
    """A model gave NaN or infinity."""


class WriteError(LowmemError):
    """A video file could not be finished.

    Attributes:
        partial_path: The playable part that was kept, or None.
    """

    def __init__(
        self,
        problem: str,
        *,
        need: str = "",
        have: str = "",
        remedy: str = "",
        partial_path: Path | None = None,
    ) -> None:
        super().__init__(problem, need=need, have=have, remedy=remedy)
        self.partial_path = partial_path


class MissingDependencyError(LowmemError):
    """An optional package is not installed."""
