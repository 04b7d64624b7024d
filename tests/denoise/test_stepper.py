"""Samplers equal diffusers' own, can be put down after any step, and cut schedules as ComfyUI does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from torch import Tensor

from lowmem_core.denoise import SAMPLERS, SamplerSettings, Stepper, make_stepper
from lowmem_core.errors import RequestError

SHAPE = (1, 4, 3, 4, 4)


def noise(seed: int = 0) -> Tensor:
    """Return seeded standard normal latents."""
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def predict(latents: Tensor, timestep: Tensor) -> Tensor:
    """Return a prediction that depends on everything, in a nonlinear way."""
    return torch.tanh(1.7 * latents + latents.roll(1, -1)) * (0.5 + float(timestep) / 2000)


def diffusers_scheduler(sampler: str, shift: float) -> Any:
    """Return the scheduler as Wan's pipelines use it."""
    if sampler == "euler":
        return FlowMatchEulerDiscreteScheduler(shift=shift)
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)


def run(stepper: Stepper, latents: Tensor, stop: int | None = None) -> Tensor:
    """Take all steps that are left, or those before ``stop``."""
    for index in range(stepper.next_index, stepper.steps if stop is None else stop):
        latents = stepper.step(predict(latents, stepper.timesteps[index]), index, latents)
    return latents


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("steps", "shift"), [(1, 5.0), (2, 3.0), (7, 5.0), (20, 1.0)])
def test_a_whole_run_has_the_bits_of_diffusers(sampler: str, steps: int, shift: float) -> None:
    """Same timesteps, same sigmas, same latents."""
    scheduler = diffusers_scheduler(sampler, shift)
    scheduler.set_timesteps(steps, device="cpu")
    expected = noise()
    for timestep in scheduler.timesteps:
        expected = scheduler.step(predict(expected, timestep), timestep, expected, return_dict=False)[0]
    stepper = make_stepper(SamplerSettings(sampler, steps, shift))
    assert torch.equal(stepper.timesteps, scheduler.timesteps)
    assert torch.equal(stepper.sigmas, scheduler.sigmas)
    assert torch.equal(run(stepper, stepper.begin(noise=noise())), expected)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("stop", range(9))
def test_a_run_put_down_after_any_step_goes_on_with_the_same_bits(sampler: str, stop: int) -> None:
    """The state is complete, and taking it changes nothing."""
    settings = SamplerSettings(sampler, 8, 5.0)
    expected = run(make_stepper(settings), noise())
    first, second = make_stepper(settings), make_stepper(settings)
    latents = run(first, noise(), stop)
    second.restore(*first.state())
    assert second.next_index == stop
    assert torch.equal(run(second, latents), expected)
    assert torch.equal(run(first, latents), expected)


@pytest.mark.parametrize("stop", range(1, 5))
@pytest.mark.parametrize("denoise", [1.0, 0.5])
def test_unipc_goes_on_in_the_middle_of_a_cut_schedule(stop: int, denoise: float) -> None:
    """History counts from the first step taken, not from the first of the schedule."""
    settings = SamplerSettings("unipc", 8, 5.0, start_step=2, end_step=7, denoise=denoise)
    expected = run(make_stepper(settings), noise())
    first, second = make_stepper(settings), make_stepper(settings)
    latents = run(first, noise(), stop)
    second.restore(*first.state())
    assert torch.equal(run(second, latents), expected)


@pytest.mark.parametrize("split", range(1, 6))
def test_two_euler_stages_are_one_run(split: int) -> None:
    """High noise up to a step with its noise left in, then low noise from there without new noise."""
    high = make_stepper(SamplerSettings("euler", 6, 5.0, end_step=split))
    low = make_stepper(SamplerSettings("euler", 6, 5.0, start_step=split))
    between = run(high, high.begin(noise=noise()))
    assert torch.equal(run(low, low.begin(between)), run(make_stepper(SamplerSettings("euler", 6, 5.0)), noise()))


def test_stages_hand_latents_on_as_comfyui_does() -> None:
    """A sampler of ComfyUI divides by the share that is not noise, and the next one multiplies by it."""
    high = make_stepper(SamplerSettings("euler", 6, 5.0, end_step=2))
    low = make_stepper(SamplerSettings("euler", 6, 5.0, start_step=2))
    between = run(high, noise())
    assert torch.equal(high.leftover(between), between / (1 - high.sigmas[-1]))
    torch.testing.assert_close(low.from_leftover(high.leftover(between)), between, rtol=3e-7, atol=0)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_stage_with_leftover_noise_is_the_beginning_of_the_whole_run(sampler: str) -> None:
    """UniPC does not lower its order because a stage ends."""
    whole = run(make_stepper(SamplerSettings(sampler, 6, 5.0)), noise(), 4)
    assert torch.equal(run(make_stepper(SamplerSettings(sampler, 6, 5.0, end_step=4)), noise()), whole)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_stage_without_leftover_noise_ends_clean(sampler: str) -> None:
    """Its last step goes to no noise: what it returns is what the model last saw behind the noise."""
    stepper = make_stepper(SamplerSettings(sampler, 6, 5.0, end_step=3, leftover_noise=False))
    latents = run(stepper, noise(), 2)
    final = run(stepper, latents)
    assert stepper.sigmas[-1] == 0
    assert bool(final.isfinite().all())
    if sampler == "euler":
        clean = stepper.predicted_clean(predict(latents, stepper.timesteps[2]), 2, latents)
        torch.testing.assert_close(final, clean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_denoise_runs_the_tail_of_a_longer_schedule(sampler: str) -> None:
    """Four steps at 0.4 are the last four of ten, as in ComfyUI."""
    part = make_stepper(SamplerSettings(sampler, 4, 5.0, denoise=0.4))
    whole = make_stepper(SamplerSettings(sampler, 10, 5.0))
    assert torch.equal(part.sigmas, whole.sigmas[-5:])
    assert torch.equal(part.timesteps, whole.timesteps[-4:])


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_noise_is_mixed_into_input_latents_at_the_level_of_the_first_step(sampler: str) -> None:
    """Flow: ``sigma * noise + (1 - sigma) * latents``; at full noise nothing of the input is left."""
    latents = 3 * noise(1)
    part = make_stepper(SamplerSettings(sampler, 4, 5.0, denoise=0.4))
    sigma = part.sigmas[0]
    assert torch.equal(part.begin(latents, noise()), sigma * noise() + (1 - sigma) * latents)
    assert torch.equal(make_stepper(SamplerSettings(sampler, 4, 5.0)).begin(latents, noise()), noise())


@pytest.mark.parametrize("given", [{"noise": noise()}, {}])
def test_a_partial_run_without_input_latents_is_refused(given: dict[str, Tensor]) -> None:
    """Noise alone at a low level is no picture."""
    with pytest.raises(RequestError, match="nothing to denoise from"):
        make_stepper(SamplerSettings("euler", 4, 5.0, denoise=0.4)).begin(**given)


@pytest.mark.parametrize(
    "bad",
    [
        {"sampler": "heun"},
        {"steps": 0},
        {"shift": 0.0},
        {"shift": float("nan")},
        {"denoise": 0.0},
        {"denoise": 1.5},
        {"start_step": 4},
        {"start_step": -1},
        {"start_step": 2, "end_step": 2},
    ],
)
def test_settings_that_cannot_work_are_refused(bad: dict[str, Any]) -> None:
    """Each message says what would do."""
    with pytest.raises(RequestError, match="cannot be used; need"):
        SamplerSettings(**({"sampler": "euler", "steps": 4, "shift": 5.0} | bad))


def test_an_end_step_past_the_end_means_the_end() -> None:
    """ComfyUI's nodes send 10000 for it."""
    assert make_stepper(SamplerSettings("euler", 4, 5.0, end_step=10_000)).steps == 4


def test_steps_out_of_order_are_refused() -> None:
    """A multistep sampler would silently give something else."""
    stepper = make_stepper(SamplerSettings("unipc", 4, 5.0))
    with pytest.raises(RequestError, match="in order"):
        stepper.step(noise(), 1, noise())


def test_a_state_of_another_sampler_is_refused() -> None:
    """Euler keeps no history, so UniPC cannot go on from its state."""
    euler, unipc = (make_stepper(SamplerSettings(name, 4, 5.0)) for name in ("euler", "unipc"))
    run(euler, noise(), 2)
    with pytest.raises(RequestError, match="another run"):
        unipc.restore(*euler.state())


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_latents_stay_float32_when_the_model_computes_in_bfloat16(sampler: str) -> None:
    """Rounding them after each step would lose small steps."""
    stepper = make_stepper(SamplerSettings(sampler, 4, 5.0))
    assert stepper.step(noise().bfloat16(), 0, noise()).dtype == torch.float32
