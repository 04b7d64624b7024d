"""The node that decodes Wan latents straight into an mp4."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import InputImpl, io, ui

from ..lowmem_core.memory import MemoryBudget
from ..lowmem_core.pipeline import DecodeRequest, decode_to_mp4
from ..lowmem_core.vae import wan_vae_config_of
from ..lowmem_core.write import AudioTrack, VideoSettings, parse_fps
from ._comfy_host import comfy_host, prefix_problem, save_target, workflow_metadata
from ._decode_schema import decode_inputs
from ._sockets import open_wan_vae


class LowmemWanStreamingDecode(io.ComfyNode):
    """Decode, encode and save, one latent frame at a time."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        return io.Schema(
            node_id="LowmemWanStreamingDecode",
            display_name="Wan Streaming Decode",
            category="LowMem",
            description="Decodes Wan latents straight into an mp4. The clip is never held in memory as a whole, "
            "so a long video needs no more than a short one.",
            inputs=decode_inputs(),
            outputs=[
                io.Video.Output("video", tooltip="The finished mp4, read from disk by whoever needs it."),
                io.String.Output("report", tooltip="What was planned and what was measured."),
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, filename_prefix: str | None) -> bool | str:
        """Refuse a prefix that leaves the output folder before anything runs."""
        problem = prefix_problem(filename_prefix) if filename_prefix is not None else None
        return True if problem is None else problem

    @classmethod
    def execute(cls, samples: dict[str, Any], vae: Any, **settings: Any) -> io.NodeOutput:
        """Decode ``samples`` and return the video with its preview; inputs as in ``decode_inputs``."""
        latents = latents_of(samples)
        module = open_wan_vae(vae)
        scale = wan_vae_config_of(module).spatial_scale
        height, width = (int(side) * scale for side in latents.shape[-2:])
        target = save_target(settings["filename_prefix"], settings["destination"], width, height)
        request = DecodeRequest(
            latents=latents,
            vae=module,
            path=target.path,
            video=video_settings(settings, workflow_metadata(cls.hidden.prompt, cls.hidden.extra_pnginfo)),
            tiling=settings["tile_size"] if settings["tiling"] == "size" else settings["tiling"],
            budget=settings.get("budget") or MemoryBudget(),
        )
        report = decode_to_mp4(request, comfy_host(cls.hidden.unique_id, is_pictured=False))
        saved = ui.SavedResult(report.path.name, target.subfolder, io.FolderType(settings["destination"]))
        return io.NodeOutput(InputImpl.VideoFromFile(str(report.path)), report.summary(), ui=ui.PreviewVideo([saved]))


def latents_of(samples: dict[str, Any]) -> torch.Tensor:
    """Return the video latents; of an audio-video model, the first of its two parts."""
    latents = samples["samples"]
    return latents.unbind()[0] if latents.is_nested else latents


def video_settings(settings: dict[str, Any], metadata: dict[str, str]) -> VideoSettings:
    """Return the core's settings for the node's widgets."""
    audio = settings.get("audio")
    return VideoSettings(
        fps=parse_fps(settings["fps"]),
        codec=settings["codec"],
        crf=settings["crf"],
        bit_depth=int(settings["bit_depth"]),
        metadata=metadata,
        audio=AudioTrack(audio["waveform"], audio["sample_rate"]) if audio else None,
        keep_partial=settings.get("keep_partial", True),
    )
