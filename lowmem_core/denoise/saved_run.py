"""Runs that survive: when the state of a denoise is saved, and how it goes on.

What is saved is always the state between two steps, so a run that goes on repeats at most the step it was stopped in,
and gives the bits of a run that was never stopped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import RequestError
from .fingerprint import Fingerprint
from .run_store import RunStore
from .stepper import Stepper, StepperState

AUTO = "auto"
NEVER = "never"
RESUME = (AUTO, NEVER)
_STEPPER = "stepper."
_LATENTS = "latents"
_log = logging.getLogger("lowmem")


@dataclass(frozen=True)
class SavePolicy:
    """When to save.

    Attributes:
        is_on: Whether to save at all.
        interval_s: Save after a step when this long has passed since the last save, or since the start: with steps
            that take longer, after every step. 0 saves after every step.
        on_stop: Whether to save when a run is interrupted or fails.
    """

    is_on: bool = True
    interval_s: float = 10.0
    on_stop: bool = True


class Progressed(NamedTuple):
    """A run between two steps.

    Attributes:
        step: Steps done.
        latents: After them, float32.
        stepper: State of the stepper after them.
    """

    step: int
    latents: Tensor
    stepper: StepperState


@dataclass
class SavedRun:
    """Keeps the state of one run in a store.

    Attributes:
        store: Where.
        fingerprint: Which run.
        policy: When.
        resume: ``auto`` goes on from a state of the same request; ``never`` starts anew and removes it.
        clock: Seconds, for the policy.
    """

    store: RunStore
    fingerprint: Fingerprint
    policy: SavePolicy = field(default_factory=SavePolicy)
    resume: str = AUTO
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        if self.resume not in RESUME:
            raise RequestError("there is no such way to resume", need=" or ".join(RESUME), have=repr(self.resume))
        self._saved_step = 0
        self._saved_at = self.clock()

    def begin(self, stepper: Stepper, device: torch.device) -> Progressed | None:
        """Return where the run goes on, its stepper restored, or None if it starts anew."""
        self._saved_step, self._saved_at = 0, self.clock()
        if not self.policy.is_on:
            return None
        if self.resume == NEVER:
            self.store.remove(self.fingerprint)
            return None
        saved = self.store.load(self.fingerprint)
        if saved is None:
            return None
        try:
            latents, state = _unpack(saved.tensors, saved.values, device)
            stepper.restore(*state)
        except (KeyError, TypeError, RequestError) as error:
            _log.warning("ignoring the saved run, which does not fit its request: %s; it starts anew", error)
            return None
        self._saved_step = stepper.next_index
        _warn_of_versions(saved.values)
        _log.info("going on with a saved run after step %d of %d", stepper.next_index, stepper.steps)
        return Progressed(stepper.next_index, latents, state)

    def after_step(self, now: Progressed, steps: int) -> None:
        """Save if it is time.

        Raises:
            WriteError: The state cannot be written.
        """
        if self.policy.is_on and self.clock() - self._saved_at >= self.policy.interval_s:
            self._save(now, steps)

    def on_stop(self, now: Progressed, steps: int) -> None:
        """Save what there is, because the run is being left; trouble is logged, for the reason to leave is reported."""
        if not (self.policy.is_on and self.policy.on_stop) or now.step == self._saved_step:
            return
        try:
            self._save(now, steps)
            _log.info("saved the run after step %d of %d; the same request goes on there", now.step, steps)
        except Exception as error:
            _log.warning("the run could not be saved: %s", error)

    def at_end(self, now: Progressed, steps: int) -> None:
        """Save the last state, because what comes next, such as the decode, may fail; trouble is logged."""
        if not self.policy.is_on or now.step == self._saved_step:
            return
        try:
            self._save(now, steps)
        except Exception as error:
            _log.warning("the finished run could not be saved: %s", error)

    def finish(self) -> None:
        """Remove the state: what the run made is safe elsewhere."""
        if self.policy.is_on:
            self.store.remove(self.fingerprint)

    def _save(self, now: Progressed, steps: int) -> None:
        tensors = {_LATENTS: now.latents}
        tensors |= {_STEPPER + name: tensor for name, tensor in now.stepper.tensors.items()}
        values = {"step": now.step, "steps": steps, "stepper": now.stepper.values, "made_with": _versions()}
        self.store.save(self.fingerprint, tensors, values)
        self._saved_step, self._saved_at = now.step, self.clock()


def _unpack(tensors: dict[str, Tensor], values: dict[str, Any], device: torch.device) -> tuple[Tensor, StepperState]:
    """Return latents and stepper state of a saved run."""
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    history = {name.removeprefix(_STEPPER): tensor for name, tensor in moved.items() if name.startswith(_STEPPER)}
    return moved[_LATENTS], StepperState(history, dict(values["stepper"]))


def _versions() -> dict[str, str]:
    import diffusers

    return {"torch": str(torch.__version__), "diffusers": str(diffusers.__version__)}


def _warn_of_versions(values: dict[str, Any]) -> None:
    """Say so when a run goes on with other libraries: hours are worth more than the last bit."""
    if values.get("made_with") != _versions():
        _log.warning(
            "this run was begun with %s and goes on with %s; the last bits may differ from an uninterrupted run",
            values.get("made_with"),
            _versions(),
        )
