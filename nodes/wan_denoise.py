"""The node that denoises with a Wan model, streamed or resident."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..lowmem_core.denoise import SAMPLERS, RunStore, SamplerSettings, SavePolicy
from ..lowmem_core.families.wan.models import WanFiles
from ..lowmem_core.families.wan.sampling import Guidance
from ..lowmem_core.memory import MemoryBudget
from ..lowmem_core.pipeline import RunSaving, WanRequest, denoise_wan
from ..lowmem_core.plan.denoise_plan import MEMORY_MODES, RESIDENT
from ._comfy_host import comfy_host, latent_picture, private_folder
from ._sockets import BUDGET, WAN_MODEL, WAN_SHELF
from ._wan_conditioning import latent_shape_of, told_of

_SEEDS = 0xFFFFFFFFFFFFFFFF


class LowmemWanStreamingDenoise(io.ComfyNode):
    """Denoise with a Wan model under a byte budget."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        return io.Schema(
            node_id="LowmemWanStreamingDenoise",
            display_name="Wan Streaming Denoise",
            category="LowMem",
            description="Makes latents with a Wan model. In stream mode only a few blocks are on the device at a "
            "time and activations are small; pixels are the same. A run that was stopped goes on where it was.",
            inputs=[*_sockets(), *_sampling(), *_memory()],
            outputs=[
                io.Latent.Output(display_name="latent", tooltip="Connect it to Wan Streaming Decode."),
                io.String.Output(display_name="report", tooltip="What was planned and what was measured."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, model: WanFiles, positive: Any, negative: Any, latent: Any, **settings: Any) -> io.NodeOutput:
        """Return the latents; inputs as in the schema."""
        samples = latent["samples"]
        shape = latent_shape_of(samples)
        config = WAN_SHELF.describe(model)[0].config
        request = WanRequest(
            files=model,
            shape=shape,
            conditioning=told_of(positive, negative, latent, config),
            sampler=_sampler(settings),
            guidance=Guidance(settings["cfg"], settings["cfg_low_noise"] or None),
            seed=settings["seed"],
            latents=samples,
            adds_noise=settings["add_noise"],
            memory_mode=settings["memory_mode"],
            budget=settings.get("budget") or MemoryBudget(),
            saving=_saving(settings),
            to_picture=latent_picture(shape.channels),
        )
        report = denoise_wan(request, comfy_host(cls.hidden.unique_id, is_vae=False), WAN_SHELF)
        return io.NodeOutput({"samples": report.latents}, report.summary())


def _sockets() -> list[io.Input]:
    return [
        WAN_MODEL.Input("model", tooltip="From Load Wan Model (LowMem) or Wan LoRA (LowMem)."),
        io.Conditioning.Input("positive", tooltip="Of a Wan text encoder, ours or ComfyUI's."),
        io.Conditioning.Input("negative", tooltip="Ignored where cfg is 1."),
        io.Latent.Input("latent", tooltip="Gives the size; the video itself where denoise is below 1."),
    ]


def _sampling() -> list[io.Input]:
    return [
        io.Int.Input("seed", default=0, min=0, max=_SEEDS, control_after_generate=True, tooltip="Of the noise."),
        io.Int.Input("steps", default=30, min=1, max=10000, tooltip="From noise to video."),
        io.Float.Input("cfg", default=5.0, min=0.0, max=100.0, step=0.1, tooltip="1 turns guidance off: one pass."),
        io.Float.Input(
            "cfg_low_noise",
            default=0.0,
            min=0.0,
            max=100.0,
            step=0.1,
            tooltip="For the low-noise transformer; 0 means the same as cfg.",
        ),
        io.Combo.Input("sampler", options=list(SAMPLERS), tooltip="unipc needs fewer steps; euler is the simplest."),
        io.Float.Input(
            "shift", default=5.0, min=0.01, max=100.0, step=0.01, tooltip="3 at 480p and 5 at 720p are usual."
        ),
        io.Float.Input(
            "denoise",
            default=1.0,
            min=0.01,
            max=1.0,
            step=0.01,
            tooltip="Below 1 the latent is kept in part: the last share of a longer schedule is run on it.",
        ),
        io.Int.Input("start_step", default=0, min=0, max=10000, tooltip="Steps before it were taken by another stage."),
        io.Int.Input("end_step", default=10000, min=1, max=10000, tooltip="Stop before this step."),
        io.Boolean.Input("add_noise", default=True, tooltip="Off for a latent that still has noise in it."),
        io.Boolean.Input("leftover_noise", default=False, tooltip="Keep the noise of end_step, for another stage."),
    ]


def _memory() -> list[io.Input]:
    return [
        io.Combo.Input(
            "memory_mode",
            options=list(MEMORY_MODES),
            default=RESIDENT,
            tooltip="resident: the whole model on the device, the plain path. stream: a few blocks at a time.",
        ),
        io.Boolean.Input(
            "save_run", default=True, tooltip="Save the state of slow runs, so that a stopped one can go on."
        ),
        io.Boolean.Input("resume", default=True, tooltip="Go on with a saved run of the very same request."),
        BUDGET.Input("budget", optional=True, tooltip="Limits of device and host memory."),
    ]


def _sampler(settings: dict[str, Any]) -> SamplerSettings:
    """Return the core's settings for the widgets."""
    return SamplerSettings(
        settings["sampler"],
        settings["steps"],
        settings["shift"],
        settings["start_step"],
        settings["end_step"],
        settings["denoise"],
        settings["leftover_noise"],
    )


def _saving(settings: dict[str, Any]) -> RunSaving:
    """Return where runs are saved; the last state stays until the folder is full, for the decode may fail."""
    policy = SavePolicy(is_on=settings["save_run"])
    return RunSaving(RunStore(private_folder("runs")), policy, "auto" if settings["resume"] else "never")
