"""The node that puts images into what a Wan model is told."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io

from ..lowmem_core.families.wan.conditioning import latent_shape
from ..lowmem_core.families.wan.images import EncodePlace, ImageConditions, condition_on_images, fitted
from ..lowmem_core.memory import MemoryBudget
from ..lowmem_core.shapes import LatentShape, VideoShape
from ..lowmem_core.vae import LatentStatistics
from ._comfy_host import comfy_host
from ._sockets import BUDGET, WAN_VAE, open_wan_vae

_MASK_CHANNELS = 4


class LowmemWanImageToVideo(io.ComfyNode):
    """Encode a first frame, and a last one, frame by frame."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        return io.Schema(
            node_id="LowmemWanImageToVideo",
            display_name="Wan Image To Video (LowMem)",
            category="LowMem",
            description="Encodes the first frame, and the last if there is one, without building the grey video "
            "around them. What it makes works with ComfyUI's own samplers too. With the Wan 2.2 VAE it keeps "
            "the first frame for TI2V models.",
            inputs=[
                io.Conditioning.Input("positive", tooltip="Of a Wan text encoder, ours or ComfyUI's."),
                io.Conditioning.Input("negative", tooltip="Gets the same images."),
                io.MultiType.Input(
                    "vae", types=[io.Vae, WAN_VAE], tooltip="From Load VAE or from Load Wan VAE (LowMem)."
                ),
                io.Image.Input("start_image", tooltip="The first frame; cut to the shape of the video and scaled."),
                io.Int.Input(
                    "width", default=832, min=16, max=8192, step=16, tooltip="A multiple of 16; of 32 for TI2V."
                ),
                io.Int.Input("height", default=480, min=16, max=8192, step=16, tooltip="Likewise."),
                io.Int.Input("length", default=81, min=1, max=8193, step=4, tooltip="Frames, 1 + 4 k."),
                io.Image.Input("end_image", optional=True, tooltip="The last frame; not for TI2V models."),
                io.ClipVisionOutput.Input("clip_vision_output", optional=True, tooltip="For Wan 2.1 image models."),
                BUDGET.Input("budget", optional=True, tooltip="If encoding does not fit, the processor does it."),
            ],
            outputs=[
                io.Conditioning.Output(display_name="positive"),
                io.Conditioning.Output(display_name="negative"),
                io.Latent.Output(display_name="latent"),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, positive: Any, negative: Any, vae: Any, start_image: Any, **settings: Any) -> io.NodeOutput:
        """Return the conditioning and the latent."""
        module: Any = open_wan_vae(vae)
        video = VideoShape(settings["length"], settings["height"], settings["width"])
        shape = latent_shape(video, int(module.config.scale_factor_spatial), int(module.config.z_dim))
        host = comfy_host(cls.hidden.unique_id)
        budget = settings.get("budget") or MemoryBudget()
        limit = budget.device_bytes or host.devices.free_bytes()
        end_image = settings.get("end_image")
        images = condition_on_images(
            module,
            shape,
            fitted(start_image, video.height, video.width),
            None if end_image is None else fitted(end_image[-1:], video.height, video.width),
            EncodePlace(host.devices.compute, limit, host.interrupt.check),
        )
        values = _values(images, settings.get("clip_vision_output"))
        told = [_with(conditioning, values) for conditioning in (positive, negative)]
        return io.NodeOutput(*told, _latent(images, shape))


def _values(images: ImageConditions, clip_vision_output: Any) -> dict[str, Any]:
    """Return what ComfyUI's own nodes for Wan images put into a conditioning."""
    values: dict[str, Any] = {}
    if images.image_condition is not None:
        latents = images.image_condition[:, _MASK_CHANNELS:]
        values["concat_latent_image"] = LatentStatistics.published(latents.shape[1]).denormalised(latents)
        values["concat_mask"] = 1.0 - images.image_condition[:, :_MASK_CHANNELS]
    if clip_vision_output is not None:
        values["clip_vision_output"] = clip_vision_output
    return values


def _with(conditioning: Any, values: dict[str, Any]) -> Any:
    """Return a conditioning with more values in each entry."""
    return [[embeds, {**held, **values}] for embeds, held in conditioning]


def _latent(images: ImageConditions, shape: LatentShape) -> dict[str, Any]:
    """Return the latent to make, with the first frame in it if that is kept."""
    samples = torch.zeros(1, *shape)
    if images.kept_frame is None:
        return {"samples": samples}
    samples[:, :, :1] = LatentStatistics.published(shape.channels).denormalised(images.kept_frame.latents)
    return {"samples": samples, "noise_mask": images.kept_frame.mask}
