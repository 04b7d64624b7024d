"""A Wan denoise from the request to latents: plan, load, place, denoise, under a budget and never lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..host import Host
from ..memory import MemoryMeter, MemoryReport, PhaseReport
from ..plan.denoise_plan import STREAM, DenoisePlan
from .decode import meter_for
from .host_weights import may_pin
from .wan_plan import plan_wan
from .wan_request import WanReport, WanRequest, saved_run_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..denoise import SavedRun, StepResult
    from ..families.wan.load import LoadedTransformer
    from ..families.wan.models import ModelShelf
    from ..families.wan.sampling import ModelOptions, WanModel
    from ..place import WeightStreamer

_log = logging.getLogger("lowmem")


def denoise_wan(request: WanRequest, host: Host, shelf: ModelShelf | None = None) -> WanReport:
    """Make latents: decide from file headers, load, place, denoise.

    Args:
        request: What to make.
        host: The surroundings.
        shelf: Keeps transformers for the next run; None loads them for this one.

    Raises:
        RequestError: The request cannot work; nothing was loaded.
        BudgetError: It does not fit; nothing was loaded.
        CheckpointError: A file cannot be loaded.
        NotFiniteError: The model gave NaN or infinity; the run is saved before that step.
    """
    from ..denoise import make_stepper
    from ..families.wan.models import ModelShelf

    started, shelf = time.perf_counter(), shelf or ModelShelf()
    stepper = make_stepper(request.sampler)
    plan, source = plan_wan(request, host, shelf)
    _log.info("%s; weights from %s", plan, source)
    host.devices.make_room(plan.planned_peak_bytes)
    transformers = shelf.load(request.files, from_disk=source == "disk")
    meter = meter_for(host.devices.compute, request.budget)
    meter.reset_peak()
    watch = _Watch(request, host)
    saved = saved_run_of(request, transformers[0].config)
    with _running(request, host, (transformers, plan, meter), shelf) as (model_of, streamer):
        model = model_of(stepper.timesteps)
        start = _start(request, stepper, host)
        latents = watch.denoise(model, start, stepper, saved)
        latents = _raw(model.finish(latents), request, stepper).to("cpu")
    seconds = time.perf_counter() - started
    phase = PhaseReport("denoise", plan.planned_peak_bytes, meter.peak_bytes, meter.measured_by, seconds)
    return WanReport(
        latents=latents,
        plan=plan,
        memory=MemoryReport((phase,)),
        source=source,
        steps_s=tuple(watch.steps_s),
        streamed_bytes=0 if streamer is None else streamer.statistics.streamed_bytes,
        total_s=seconds,
        saved=saved,
    )


@contextmanager
def _running(
    request: WanRequest,
    host: Host,
    models: tuple[Sequence[LoadedTransformer], DenoisePlan, MemoryMeter],
    shelf: ModelShelf,
) -> Iterator[tuple[Callable[[Tensor], WanModel], WeightStreamer | None]]:
    """Place the transformers; yield what makes a model of the timesteps, and the streamer if there is one."""
    from ..families.wan.lean import lean
    from ..families.wan.lora import applied_to_each
    from ..families.wan.placement import placed, polled
    from ..families.wan.sampling import Experts, WanModel
    from ..place import StreamOptions

    transformers, plan, meter = models
    streamed_bytes = sum(stream.streamed_bytes for stream in plan.streams)
    options = StreamOptions(pinned=may_pin(streamed_bytes, request.budget), mark_host=meter.host_allocation)
    modules = [one.module for one in transformers]
    with ExitStack() as stack:
        transformers = stack.enter_context(applied_to_each(transformers, request.files.loras))
        stack.enter_context(meter.measuring())
        place = placed(transformers, plan, host.devices.compute, options, shelf.invalidator(transformers))
        streamer = stack.enter_context(place)
        for module in modules:
            if streamer is None:
                meter.track([*module.parameters(), *module.buffers()])
            if plan.memory_mode == STREAM:
                stack.enter_context(lean(module))
            stack.enter_context(polled(module, host.interrupt.check))
        config, boundary = transformers[0].config, request.files.boundary(transformers[0].config)
        experts = Experts(modules[0], modules[1] if len(modules) > 1 else None, boundary, transformers[0].dtype)
        told = replace(request.conditioning, per_token_timesteps=config.has_timestep_per_token)
        run = _model_options(plan, streamer)
        yield (lambda timesteps: WanModel(experts, told, request.guidance, timesteps, run)), streamer


def _model_options(plan: DenoisePlan, streamer: WeightStreamer | None) -> ModelOptions:
    """Return how passes run under a plan."""
    from ..families.wan.passes import run_passes
    from ..families.wan.sampling import ModelOptions, one_at_a_time

    def announce(module: Any, following: Any) -> None:
        if streamer is not None:
            streamer.announce(module, following or module)

    return ModelOptions(
        run_passes=run_passes if plan.shares_blocks else one_at_a_time,
        on_expert=announce,
        host_timesteps=plan.memory_mode == STREAM,
    )


class _Watch:
    """Runs the loop, times its steps and shows previews."""

    def __init__(self, request: WanRequest, host: Host) -> None:
        from ..denoise import previewing

        self.steps_s: list[float] = []
        self._host = host
        self._show = None if request.to_picture is None else previewing(host.progress, request.to_picture)

    def denoise(self, model: WanModel, start: Tensor, stepper: Any, saved: SavedRun | None) -> Tensor:
        """Return the latents after the last step."""
        from ..denoise import denoise

        host = self._host
        return denoise(
            model,
            start,
            stepper,
            interrupt=host.interrupt,
            progress=host.progress,
            on_step=self._on_step,
            saving=saved,
        )

    def _on_step(self, result: StepResult) -> None:
        self.steps_s.append(result.step_s)
        if self._show is not None:
            self._show(result)


def _start(request: WanRequest, stepper: Any, host: Host) -> Tensor:
    """Return what the first step starts from, on the device."""
    from ..families.wan.conditioning import initial_noise
    from ..vae import LatentStatistics

    latents = request.latents
    if latents is not None:
        latents = LatentStatistics.published(request.shape.channels).normalised(latents.float())
    noise = initial_noise(request.shape, request.seed) if request.adds_noise else None
    if noise is None and latents is not None:
        latents = stepper.from_leftover(latents)
    start: Tensor = stepper.begin(latents, noise)
    return start.to(host.devices.compute)


def _raw(latents: Tensor, request: WanRequest, stepper: Any) -> Tensor:
    """Return latents as ComfyUI hands them on."""
    from ..vae import LatentStatistics

    return LatentStatistics.published(request.shape.channels).denormalised(stepper.leftover(latents))
