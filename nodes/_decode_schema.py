"""What the Wan Streaming Decode node asks for. New inputs go last: saved workflows hold values by position."""

from __future__ import annotations

from comfy_api.latest import io

from ._sockets import BUDGET, WAN_VAE

TILINGS = ["auto", "off", "blended", "size"]


def decode_inputs() -> list[io.Input]:
    """Return the inputs in the order of the widgets."""
    return [
        io.Latent.Input("samples", tooltip="Video latents of a Wan model, one video."),
        io.MultiType.Input(
            "vae",
            types=[io.Vae, WAN_VAE],
            tooltip="The Wan VAE, from Load VAE or from Load Wan VAE (LowMem).",
        ),
        *_video_inputs(),
        *_file_inputs(),
        *_memory_inputs(),
    ]


def _video_inputs() -> list[io.Input]:
    """Return what describes the video stream."""
    return [
        io.Float.Input(
            "fps",
            default=16.0,
            min=0.01,
            max=1000.0,
            step=0.001,
            tooltip="Frames per second: 16 for Wan 2.1 and Wan 2.2 14B, 24 for Wan 2.2 5B.",
        ),
        io.Combo.Input(
            "codec",
            options=["h264", "hevc", "av1"],
            default="h264",
            tooltip="h264 plays everywhere. hevc and av1 give smaller files and take longer.",
        ),
        io.Int.Input(
            "crf",
            default=18,
            min=0,
            max=63,
            tooltip="Quality: lower is better and larger. 0 to 51, for av1 to 63. 18 in h264 looks like the frames.",
        ),
        io.Combo.Input(
            "bit_depth",
            options=["8", "10"],
            default="8",
            tooltip="10 bit shows no bands in skies and fog, but some players and phones cannot show it.",
        ),
    ]


def _file_inputs() -> list[io.Input]:
    """Return what names the file."""
    return [
        io.String.Input(
            "filename_prefix",
            default="video/lowmem",
            tooltip="Name and subfolder. %width%, %height%, %year%, %month% and so on are filled in.",
        ),
        io.Combo.Input(
            "destination",
            options=["output", "temp"],
            default="output",
            tooltip="temp is emptied when ComfyUI starts and stops: choose it when another node saves the video.",
        ),
    ]


def _memory_inputs() -> list[io.Input]:
    """Return what decides how memory is spent and what a failure leaves, and the optional sockets."""
    return [
        io.Combo.Input(
            "tiling",
            options=TILINGS,
            default="auto",
            tooltip="auto: the exact tiles of this VAE and frame size, the same on every card, with the pixels of "
            "whole frames up to rounding. off: whole frames or an error. size: tiles of tile_size. "
            "blended: overlapping tiles, faded into each other; the pixels differ.",
        ),
        io.Int.Input(
            "tile_size",
            default=256,
            min=64,
            max=4096,
            step=16,
            tooltip="Side of a tile in pixels, used when tiling is size.",
        ),
        io.Boolean.Input(
            "keep_partial",
            default=True,
            optional=True,
            tooltip="When the run is stopped or fails, keep the frames so far as a playable <name>.partial.mp4.",
        ),
        io.Audio.Input("audio", optional=True, tooltip="Sound for the video."),
        BUDGET.Input("budget", optional=True, tooltip="A limit for this node. Without it: all that can be freed."),
    ]
