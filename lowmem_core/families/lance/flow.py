"""From noise to an image along straight lines: noise levels, guidance and steps as the reference takes them.

The state stays in the dtype of the model, bf16 for the published one, and is rounded at every step. Step sizes and the
scale of renormed guidance stay tensors on the device that computes: a number from the host would be rounded elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...denoise import StepperState
from ...errors import RequestError
from .config import LATENT_CHANNELS

GLOBAL = "global"
CHANNEL = "channel"
NONE = "none"
RENORMS = (GLOBAL, CHANNEL, NONE)
MAX_STEPS = 10_000
_TINY = 1e-8


@dataclass(frozen=True)
class LanceGuidance:
    """How strongly the prompt is followed.

    Attributes:
        scale: 1 or less turns guidance off, and saves a side.
        interval: Guide where the noise is above the first and not above the second, in 0..1.
        renorm: Shrink guided velocities to the length of unguided ones: over the whole image (``global``), for each
            latent (``channel``, in float32 only) or not at all (``none``).
        renorm_floor: How far they may shrink, in 0..1.
    """

    scale: float = 4.0
    interval: tuple[float, float] = (0.4, 1.0)
    renorm: str = GLOBAL
    renorm_floor: float = 0.0

    def __post_init__(self) -> None:
        low, high = self.interval
        if not math.isfinite(self.scale):
            raise RequestError("this guidance cannot be used", need="a number", have=str(self.scale))
        if not (0 <= low <= 1 and 0 <= high <= 1 and low <= high):
            need = "two numbers in 0 to 1, the smaller one first"
            raise RequestError("this interval of guidance cannot be used", need=need, have=f"{low} to {high}")
        if self.renorm not in RENORMS:
            raise RequestError("there is no such renorm", need=" or ".join(RENORMS), have=repr(self.renorm))
        if not 0 <= self.renorm_floor <= 1:
            raise RequestError("this renorm floor cannot be used", need="0 to 1", have=str(self.renorm_floor))

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise RequestError where the reference could not run: its renorm for each latent needs float32."""
        if self.renorm == CHANNEL and self.scale > 1 and dtype != torch.float32:
            raise RequestError(
                f"renorm {CHANNEL!r} cannot be used in {str(dtype).removeprefix('torch.')}",
                need="float32: a scale for each latent is float32, and so would the latents become",
                have=str(dtype).removeprefix("torch."),
                remedy=f"Use renorm {GLOBAL!r} or {NONE!r}, or compute in fp32.",
            )

    def is_active(self, time: float) -> bool:
        """Return whether the unconditional side is needed at a time."""
        low, high = self.interval
        return self.scale > 1 and low < time <= high

    def combined(self, conditional: Tensor, unconditional: Tensor) -> Tensor:
        """Return the guided velocity of two ``[N, 48]``."""
        guided = unconditional + self.scale * (conditional - unconditional)
        if self.renorm == NONE:
            return guided
        axis = -1 if self.renorm == CHANNEL else None
        wanted, found = (_length(values, axis) for values in (conditional, guided))
        scale = torch.clamp(wanted / (found + _TINY), min=self.renorm_floor, max=1.0)
        return guided * scale


@dataclass(frozen=True)
class LanceSchedule:
    """Noise levels.

    Attributes:
        steps: From noise to an image.
        shift: How far they are moved towards noise.
    """

    steps: int = 30
    shift: float = 3.5

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= MAX_STEPS:
            raise RequestError("this number of steps cannot be used", need=f"1 to {MAX_STEPS}", have=str(self.steps))
        if not (math.isfinite(self.shift) and self.shift > 0):
            raise RequestError("this shift cannot be used", need="a positive number", have=str(self.shift))

    def levels(self, device: torch.device) -> Tensor:
        """Return ``[steps + 1]`` float32 from 1 to 0."""
        even = torch.linspace(1, 0, self.steps + 1, device=device)
        return self.shift * even / (1 + (self.shift - 1) * even)


class LanceStepper:
    """Takes latents from one noise level to the next.

    Args:
        schedule: The levels.
        device: That computes.

    Attributes:
        timesteps: ``[steps]`` float32 on the device: the time before each step.
        times: The same as numbers.
    """

    def __init__(self, schedule: LanceSchedule, device: torch.device) -> None:
        levels = schedule.levels(device)
        self.timesteps = levels[:-1]
        self.times: list[float] = self.timesteps.tolist()
        self._sizes = levels[:-1] - levels[1:]
        self._next = 0

    @property
    def steps(self) -> int:
        """How many steps are taken."""
        return len(self.times)

    @property
    def next_index(self) -> int:
        """Which step comes next, from 0."""
        return self._next

    def step(self, prediction: Tensor, index: int, latents: Tensor) -> Tensor:
        """Return the latents after step ``index``, which must be the next one."""
        if index != self._next:
            raise RequestError("steps must be taken in order", need=f"step {self._next}", have=f"step {index}")
        self._next += 1
        return latents - prediction * self._sizes[index]

    def predicted_clean(self, prediction: Tensor, index: int, latents: Tensor) -> Tensor:
        """Return the latents without noise as the model sees them at step ``index``, for a preview."""
        return latents - prediction * self.timesteps[index]

    def state(self) -> StepperState:
        """Return what must be kept to go on later: which step comes next."""
        return StepperState({}, {"next_index": self._next})

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, int]) -> None:
        """Go on where ``state`` was taken.

        Raises:
            RequestError: The state is of another schedule.
        """
        index = values.get("next_index", -1)
        if tensors or not 0 <= index <= self.steps:
            have = f"step {index} with {', '.join(tensors) or 'no tensors'}"
            raise RequestError("the saved state is of another run", need=f"one of {self.steps} steps", have=have)
        self._next = index


def initial_noise(latents: int, seed: int, device: torch.device) -> Tensor:
    """Return ``[N, 48]`` bf16: one draw of a generator of its own on the device that computes.

    Raises:
        RequestError: torch takes no such seed.
    """
    try:
        generator = torch.Generator(device).manual_seed(seed)
    except (RuntimeError, OverflowError) as error:
        raise RequestError("this seed cannot be used", need="a number of 64 bits", have=str(seed)) from error
    return torch.randn(latents, LATENT_CHANNELS, dtype=torch.bfloat16, device=device, generator=generator)


def _length(values: Tensor, axis: int | None) -> Tensor:
    """Return the Euclidean length in float32: of everything, or along an axis that stays."""
    length: Tensor = torch.linalg.vector_norm(values.float(), dim=axis, keepdim=axis is not None)
    return length
