"""The loop takes all steps, can be watched and stopped, and names the step at which a model fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lowmem_core.denoise import SamplerSettings, StepResult, denoise, make_stepper, previewing
from lowmem_core.errors import NotFiniteError

SETTINGS = SamplerSettings("unipc", 4, 5.0)


class Recorder:
    """Keeps what a progress display was told."""

    def __init__(self) -> None:
        self.updates: list[tuple[int, int, str]] = []
        self.frames: list[Tensor] = []

    def update(self, done: int, total: int, phase: str) -> None:
        """Keep the report."""
        self.updates.append((done, total, phase))

    def preview(self, frame: Tensor) -> None:
        """Keep the frame."""
        self.frames.append(frame)


class StopAfter:
    """A stop button that is pressed before one step."""

    def __init__(self, step: int) -> None:
        self.left = step

    def check(self) -> None:
        """Raise at its step."""
        self.left -= 1
        if self.left < 0:
            raise InterruptedError


def test_every_step_is_reported_with_clean_latents(toy_model: Any, noise: Tensor) -> None:
    """The last clean latents are the result, because the last step goes to no noise."""
    seen: list[StepResult] = []
    recorder = Recorder()
    result = denoise(toy_model(), noise, make_stepper(SETTINGS), progress=recorder, on_step=seen.append)
    assert [(one.step, one.steps) for one in seen] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert recorder.updates == [(done, 4, "denoise") for done in range(5)]
    assert torch.equal(seen[-1].latents, result)
    assert (seen[-1].clean - result).abs().mean() < 0.5 * (seen[0].clean - result).abs().mean()


def test_a_preview_is_a_float_picture_within_range(toy_model: Any, noise: Tensor) -> None:
    """Whatever the conversion gives, the display gets 0..1."""
    recorder = Recorder()
    show = previewing(recorder, lambda clean: 2 * clean[0, :3, 0].movedim(0, -1).bfloat16())
    denoise(toy_model(), noise, make_stepper(SETTINGS), on_step=show)
    assert [tuple(frame.shape) for frame in recorder.frames] == [(4, 4, 3)] * 4
    assert all(frame.dtype == torch.float32 and 0 <= frame.min() <= frame.max() <= 1 for frame in recorder.frames)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_gives_no_number_stops_with_the_step_named(value: float, toy_model: Any, noise: Tensor) -> None:
    """One bad value is enough, and the message says how many there were."""

    def spoil(latents: Tensor) -> Tensor:
        bad = latents.clone()
        bad[0, 0, 0, 0, 0] = value
        return bad

    with pytest.raises(NotFiniteError, match="step 3 of 4; have 1 of 192 values"):
        denoise(toy_model(2, spoil), noise, make_stepper(SETTINGS))


def test_the_stop_button_is_looked_at_before_each_step(toy_model: Any, noise: Tensor) -> None:
    """The model is not called again after it."""
    model = toy_model()
    with pytest.raises(InterruptedError):
        denoise(model, noise, make_stepper(SETTINGS), interrupt=StopAfter(2))
    assert model.calls == 2


def test_the_callers_latents_are_not_written_to(toy_model: Any, noise: Tensor) -> None:
    """They may be saved, shown or used again."""
    before = noise.clone()
    denoise(toy_model(), noise, make_stepper(SETTINGS))
    assert torch.equal(noise, before)
