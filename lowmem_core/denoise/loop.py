"""The denoising loop: one step after the other, watched, stoppable, and never lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..errors import NotFiniteError
from ..host import Interrupt, NeverInterrupt, Progress, SilentProgress
from .saved_run import Progressed, SavedRun
from .stepper import Stepper

PHASE = "denoise"


class Model(Protocol):
    """What predicts."""

    def __call__(self, latents: Tensor, timestep: Tensor, step_index: int) -> Tensor:
        """Return the prediction for ``latents`` at ``timestep``, of the same shape."""


@dataclass(frozen=True)
class StepResult:
    """A step that has been taken.

    Attributes:
        step: Its number, from 1.
        steps: How many there are.
        latents: After it.
        clean: ``[B, C, F, H, W]``: the latents without noise as the model sees them.
        step_s: How long it took.
    """

    step: int
    steps: int
    latents: Tensor
    clean: Tensor
    step_s: float


def denoise(
    model: Model,
    latents: Tensor,
    stepper: Stepper,
    *,
    interrupt: Interrupt | None = None,
    progress: Progress | None = None,
    on_step: Callable[[StepResult], None] | None = None,
    saving: SavedRun | None = None,
) -> Tensor:
    """Take all steps of ``stepper``, going on with a saved run of the same request if there is one.

    The state of a run stays in its store when the loop ends; call ``saving.finish()`` once the latents are safe.

    Args:
        model: What predicts.
        latents: What ``stepper.begin`` returned, on the device that computes.
        stepper: At its first step.
        interrupt: Polled before each step.
        progress: Told after each step.
        on_step: Called after each step; ``previewing`` makes one that shows a picture.
        saving: Where the state is kept, or None to keep none.

    Returns:
        The latents after the last step, float32.

    Raises:
        NotFiniteError: The model gave NaN or infinity.
        WriteError: The state of a slow run could not be saved.
    """
    interrupt, progress = interrupt or NeverInterrupt(), progress or SilentProgress()
    now = saving.begin(stepper, latents.device) if saving else None
    now = now or Progressed(0, latents, stepper.state())
    progress.update(now.step, stepper.steps, PHASE)
    try:
        while now.step < stepper.steps:
            interrupt.check()
            now = _step(model, now, stepper, on_step)
            progress.update(now.step, stepper.steps, PHASE)
            if saving:
                saving.after_step(now, stepper.steps)
    except BaseException:
        if saving:
            saving.on_stop(now, stepper.steps)
        raise
    if saving:
        saving.at_end(now, stepper.steps)
    return now.latents


def previewing(progress: Progress, to_picture: Callable[[Tensor], Tensor]) -> Callable[[StepResult], None]:
    """Return an ``on_step`` that shows what the latents of each step look like.

    Args:
        progress: Where to show it.
        to_picture: Turns clean latents ``[B, C, F, H, W]`` into ``[H, W, 3]`` float RGB in 0..1.
    """

    def show(result: StepResult) -> None:
        progress.preview(to_picture(result.clean).clamp(0, 1).to("cpu", torch.float32))

    return show


def _step(model: Model, now: Progressed, stepper: Stepper, on_step: Callable[[StepResult], None] | None) -> Progressed:
    """Take one step."""
    start_s = time.monotonic()
    prediction = model(now.latents, stepper.timesteps[now.step], now.step)
    _check_finite(prediction, now.step + 1, stepper.steps)
    latents = stepper.step(prediction, now.step, now.latents)
    done = Progressed(now.step + 1, latents, stepper.state())
    if on_step:
        clean = stepper.predicted_clean(prediction, now.step, now.latents)
        on_step(StepResult(done.step, stepper.steps, latents, clean, time.monotonic() - start_s))
    return done


def _check_finite(prediction: Tensor, step: int, steps: int) -> None:
    """Raise unless all values are finite; one number crosses from the device, once a step."""
    bad = int(prediction.numel() - torch.isfinite(prediction).sum())
    if bad:
        raise NotFiniteError(
            f"the model gave values that are not finite at step {step} of {steps}",
            have=f"{bad} of {prediction.numel()} values",
            remedy="Use bf16 or fp32 instead of fp16, lower LoRA strengths, or check the model file.",
        )
