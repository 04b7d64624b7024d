"""Samplers that can be put down and taken up again: diffusers' flow schedulers with their state in our hands.

A stepper runs part of a schedule. ``denoise`` lengthens the schedule and keeps its last ``steps`` steps, and
``start_step`` and ``end_step`` cut those, all as ComfyUI's samplers do, so that a run may be split in stages.
With leftover noise a stage takes exactly the steps that the whole run would have taken there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import RequestError

UNIPC = "unipc"
EULER = "euler"
SAMPLERS = (UNIPC, EULER)
TRAIN_TIMESTEPS = 1000
MAX_STEPS = 10_000
_WHOLE = 0.9999


@dataclass(frozen=True)
class SamplerSettings:
    """How noise becomes latents.

    Attributes:
        sampler: ``unipc`` or ``euler``.
        steps: Steps from the first noise level to none; with ``denoise`` the steps that are left.
        shift: How far the noise levels are moved towards noise: 3 at 480p and 5 at 720p are usual.
        start_step: The first step to take; those before it were taken by an earlier stage.
        end_step: The step to stop before, or None for all.
        denoise: The share of the schedule to run on input latents, in (0, 1].
        leftover_noise: Whether a run that stops early returns latents with the noise of that step in them; if not,
            its last step goes to no noise.
    """

    sampler: str
    steps: int
    shift: float
    start_step: int = 0
    end_step: int | None = None
    denoise: float = 1.0
    leftover_noise: bool = True

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLERS:
            raise _unusable("sampler", " or ".join(SAMPLERS), self.sampler)
        if not 1 <= self.steps <= MAX_STEPS:
            raise _unusable("number of steps", f"1 to {MAX_STEPS}", self.steps)
        if not (math.isfinite(self.shift) and self.shift > 0):
            raise _unusable("shift", "a positive number", self.shift)
        if not 0 < self.denoise <= 1:
            raise _unusable("denoise", "more than 0, at most 1", self.denoise)
        if not 0 <= self.start_step < self.stop_step:
            need = f"0 <= start step < end step, and {self.steps} steps"
            raise _unusable("range of steps", need, f"start {self.start_step}, end {self.end_step}")

    @property
    def stop_step(self) -> int:
        """The step to stop before: ``end_step``, but never past the last."""
        return self.steps if self.end_step is None else min(self.end_step, self.steps)

    @property
    def schedule_steps(self) -> int:
        """Steps of the whole schedule, of which the last ``steps`` count."""
        return self.steps if self.denoise > _WHOLE else int(self.steps / self.denoise)

    @property
    def skipped_steps(self) -> int:
        """Steps of the schedule before the first one to take."""
        return self.schedule_steps - self.steps + self.start_step


class StepperState(NamedTuple):
    """What a stepper remembers between two steps.

    Attributes:
        tensors: By name; never written to afterwards.
        values: Whole numbers by name.
    """

    tensors: dict[str, Tensor]
    values: dict[str, int]


def make_stepper(settings: SamplerSettings) -> Stepper:
    """Return a stepper at the first step of ``settings``."""
    return Stepper(settings)


class Stepper:
    """Takes latents from one noise level to the next.

    The arithmetic is diffusers'. Latents stay float32 whatever the model computes in; diffusers' own Euler
    scheduler would round them to the model's type after each step.

    Args:
        settings: Which steps of which schedule.

    Attributes:
        settings: As given.
        timesteps: ``[steps]``, on the CPU, of the steps to take; int64 for UniPC as in diffusers, else float32.
        sigmas: ``[steps + 1]`` float32 on the CPU: the noise level before each step, and after the last.
    """

    def __init__(self, settings: SamplerSettings) -> None:
        self.settings = settings
        self._first = settings.skipped_steps
        self._last = self._first + settings.stop_step - settings.start_step
        self._scheduler = _scheduler_of(settings)
        if not settings.leftover_noise:
            self._end_without_noise()
        self._scheduler.set_begin_index(self._first)
        self.timesteps: Tensor = self._scheduler.timesteps[self._first : self._last]
        self.sigmas: Tensor = self._scheduler.sigmas[self._first : self._last + 1]

    @property
    def steps(self) -> int:
        """How many steps are taken."""
        return self._last - self._first

    @property
    def next_index(self) -> int:
        """Which step comes next, from 0."""
        index = self._scheduler.step_index
        return 0 if index is None else int(index) - self._first

    def begin(self, latents: Tensor | None = None, noise: Tensor | None = None) -> Tensor:
        """Return what the first step starts from, float32.

        Args:
            latents: ``[B, C, F, H, W]`` to start from; without ``noise`` they already hold that of the first step.
            noise: Standard normal, of the same shape; mixed in at the level of the first step.

        Raises:
            RequestError: There is neither, or noise alone where the schedule begins below full noise.
        """
        if noise is None and latents is not None:
            return latents.float()
        if noise is not None and self._first == 0:
            return noise.float()
        if noise is None or latents is None:
            raise RequestError(
                "there is nothing to denoise from",
                need="input latents, because the run starts below full noise" if noise is not None else "noise",
                have="no latents",
                remedy="Give latents, or use denoise 1 and start step 0.",
            )
        sigma = self.sigmas[0]
        return sigma * noise.float() + (1.0 - sigma) * latents.float()

    def step(self, prediction: Tensor, index: int, latents: Tensor) -> Tensor:
        """Take step ``index`` and return the latents after it.

        Args:
            prediction: What the model says about ``latents`` at ``timesteps[index]``, of the same shape.
            index: Counted from 0; must be the next one.
            latents: Float32.

        Raises:
            RequestError: It is not the turn of this step.
        """
        if index != self.next_index or not 0 <= index < self.steps:
            raise RequestError(
                "steps must be taken in order", need=f"step {self.next_index} of {self.steps}", have=f"step {index}"
            )
        if self.settings.sampler == EULER:
            prediction = prediction.to(latents.dtype)
        after: Tensor = self._scheduler.step(prediction, self.timesteps[index], latents, return_dict=False)[0]
        return after

    def predicted_clean(self, prediction: Tensor, index: int, latents: Tensor) -> Tensor:
        """Return the latents without noise as the model sees them at step ``index``, for a preview."""
        return latents - self.sigmas[index] * prediction

    def state(self) -> StepperState:
        """Return what must be kept to go on later; taken between two steps."""
        values = {"next_index": self.next_index}
        if self.settings.sampler == EULER or self.next_index == 0:
            return StepperState({}, values)
        scheduler = self._scheduler
        values |= {"lower_order_nums": int(scheduler.lower_order_nums), "this_order": int(scheduler.this_order)}
        tensors = {f"model_output_{n}": tensor for n, tensor in enumerate(scheduler.model_outputs)}
        tensors["last_sample"] = scheduler.last_sample
        return StepperState({name: tensor for name, tensor in tensors.items() if tensor is not None}, values)

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, int]) -> None:
        """Go on where ``state`` was taken.

        Args:
            tensors: Those of the state, on the device that computes.
            values: Those of the state.

        Raises:
            RequestError: The state is of another sampler or another schedule.
        """
        index = values.get("next_index", -1)
        needs_history = self.settings.sampler == UNIPC and index > 0
        if not 0 <= index <= self.steps or needs_history != ("last_sample" in tensors):
            raise RequestError(
                "the saved state is of another run",
                need=f"{self.settings.sampler} at one of {self.steps} steps",
                have=f"step {index} with {', '.join(tensors) or 'no tensors'}",
            )
        self._scheduler._step_index = self._first + index if index else None
        if needs_history:
            self._restore_history(tensors, values)

    def leftover(self, latents: Tensor) -> Tensor:
        """Return what this run made as ComfyUI's samplers hand it on: divided by what is not noise in it."""
        return latents / (1.0 - self.sigmas[-1])

    def from_leftover(self, latents: Tensor) -> Tensor:
        """Return what a sampler of ComfyUI handed on, to start from without adding noise."""
        return (1.0 - self.sigmas[0]) * latents.float()

    def _restore_history(self, tensors: Mapping[str, Tensor], values: Mapping[str, int]) -> None:
        """Give UniPC its former predictions back."""
        scheduler = self._scheduler
        order = len(scheduler.model_outputs)
        scheduler.model_outputs = [tensors.get(f"model_output_{n}") for n in range(order)]
        past = range(scheduler.step_index - order, scheduler.step_index)
        scheduler.timestep_list = [scheduler.timesteps[n] if n >= self._first else None for n in past]
        scheduler.last_sample = tensors["last_sample"]
        scheduler.lower_order_nums = values["lower_order_nums"]
        scheduler.this_order = values["this_order"]

    def _end_without_noise(self) -> None:
        """Cut the schedule after the last step to take, and let that one end at no noise."""
        scheduler = self._scheduler
        scheduler.timesteps = scheduler.timesteps[: self._last]
        scheduler.num_inference_steps = self._last
        scheduler.sigmas = torch.cat([scheduler.sigmas[: self._last], scheduler.sigmas.new_zeros(1)])


def _scheduler_of(settings: SamplerSettings) -> Any:
    """Return diffusers' scheduler with the whole schedule in it."""
    from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

    if settings.sampler == EULER:
        scheduler: Any = FlowMatchEulerDiscreteScheduler(num_train_timesteps=TRAIN_TIMESTEPS, shift=settings.shift)
    else:
        scheduler = UniPCMultistepScheduler(
            num_train_timesteps=TRAIN_TIMESTEPS,
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            flow_shift=settings.shift,
        )
    scheduler.set_timesteps(settings.schedule_steps, device="cpu")
    return scheduler


def _unusable(what: str, need: str, have: object) -> RequestError:
    """Return the error for a setting that cannot work."""
    return RequestError(f"this {what} cannot be used", need=need, have=str(have))
