"""Where and when a run is saved, as requests say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..denoise import Fingerprint, RunStore, SavedRun, SavePolicy


@dataclass(frozen=True)
class RunSaving:
    """Where and when a run is saved.

    Attributes:
        store: Where.
        policy: When; None for every step that comes ten seconds after the last save, and on every stop.
        resume: ``auto`` or ``never``.
    """

    store: RunStore
    policy: SavePolicy | None = None
    resume: str = "auto"

    def saved_run(self, fingerprint: Fingerprint) -> SavedRun:
        """Return where the run of a request is saved."""
        from ..denoise import SavedRun, SavePolicy

        return SavedRun(self.store, fingerprint, self.policy or SavePolicy(), self.resume)
