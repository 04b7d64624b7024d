"""Which encoder makes which codec, set so that a kill never costs more than a second of video.

An encoder holds frames back: to look ahead, to reorder them, and one per extra thread. What it holds and
what the muxer has not flushed is lost when the process dies. ``Latency`` shares one second among them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ..errors import RequestError
from ._av import load_av
from .settings import PRESETS, VideoSettings

ENCODERS = {"h264": "libx264", "hevc": "libx265", "av1": "libsvtav1"}
PIXEL_FORMATS = {8: "yuv420p", 10: "yuv420p10le"}

_MAX_LOOKAHEAD = 40
_MAX_BFRAMES = 3
_MAX_THREADS = 8
_SVT_SLOWEST, _SVT_FASTEST = 3, 12


@dataclass(frozen=True)
class Latency:
    """Frames that may be unwritten at any moment, together at most one second (or one frame).

    Attributes:
        gop: Frames between key frames at most.
        fragment: Frames the muxer collects before it flushes them.
        hold: Frames the encoder may keep.
    """

    gop: int
    fragment: int
    hold: int

    @classmethod
    def of(cls, fps: Fraction) -> Latency:
        """Return the shares of one second at ``fps`` frames per second."""
        second = max(1, int(fps))
        fragment = max(1, second // 4)
        return cls(gop=second, fragment=fragment, hold=max(0, second - fragment - 1))


def find_encoder(settings: VideoSettings) -> str:
    """Return the name of the encoder for ``settings``.

    Raises:
        RequestError: This build of PyAV has no such encoder, or not at that bit depth.
        MissingDependencyError: PyAV is not installed.
    """
    av = load_av()
    name = ENCODERS[settings.codec]
    try:
        codec = av.Codec(name, "w")
    except ValueError as error:
        raise _no_encoder(settings, f"a PyAV build with {name}", "none") from error
    formats = {item.name for item in codec.video_formats or ()}
    if PIXEL_FORMATS[settings.bit_depth] not in formats:
        raise _no_encoder(settings, f"{name} with {settings.bit_depth} bits", "another build of it")
    return name


def _no_encoder(settings: VideoSettings, need: str, have: str) -> RequestError:
    """Return the error for an encoder that this PyAV lacks."""
    return RequestError(
        f"this PyAV cannot encode {settings.codec}",
        need=need,
        have=have,
        remedy='Use codec "h264" with 8 bits, or install PyAV from its official wheels.',
    )


def encoder_options(settings: VideoSettings) -> dict[str, str]:
    """Return the encoder's own options for ``settings``, with its delay kept inside ``Latency.hold``."""
    latency = Latency.of(settings.fps)
    build = {"h264": _x264, "hevc": _x265, "av1": _svt}[settings.codec]
    return {"crf": str(settings.crf), **build(settings.preset, latency)}


def _x264(preset: str, latency: Latency) -> dict[str, str]:
    """x264 delays ``lookahead + threads`` frames."""
    hold = latency.hold
    threads = max(1, min(hold // 4, _MAX_THREADS, os.cpu_count() or 1))
    bframes = min(_MAX_BFRAMES, hold // 4)
    lookahead = min(_MAX_LOOKAHEAD, hold - threads - 1) if bframes else 0
    params = f"sync-lookahead=0:force-cfr=1:bframes={bframes}:rc-lookahead={lookahead}:threads={threads}"
    return {"preset": preset, "x264-params": params}


def _x265(preset: str, latency: Latency) -> dict[str, str]:
    """x265 delays ``lookahead + bframes + frame threads + 2`` frames, or none without B-frames."""
    bframes = min(_MAX_BFRAMES, latency.hold // 5)
    threads = max(1, min(3, latency.hold // 6))
    lookahead = min(_MAX_LOOKAHEAD, latency.hold - bframes - threads - 2)
    if lookahead <= bframes:
        bframes, threads, lookahead = 0, 1, 0
    params = (
        f"log-level=error:open-gop=0:bframes={bframes}:rc-lookahead={lookahead}"
        f":frame-threads={threads}:keyint={latency.gop}"
    )
    return {"preset": preset, "x265-params": params}


def _svt(preset: str, latency: Latency) -> dict[str, str]:
    """SVT-AV1 in its low-delay structure gives every frame back at once; its presets are 12 (fast) to 3."""
    steps = len(PRESETS) - 1
    speed = round(_SVT_FASTEST - (_SVT_FASTEST - _SVT_SLOWEST) * PRESETS.index(preset) / steps)
    return {"preset": str(speed), "svtav1-params": f"pred-struct=1:keyint={latency.gop}"}


def add_video_stream(container: Any, settings: VideoSettings, height: int, width: int) -> Any:
    """Add the stream of ``settings`` to an ``av`` output container, tagged BT.709 limited range."""
    latency = Latency.of(settings.fps)
    stream = container.add_stream(find_encoder(settings), rate=settings.fps, options=encoder_options(settings))
    stream.height, stream.width = height, width
    stream.pix_fmt = PIXEL_FORMATS[settings.bit_depth]
    context = stream.codec_context
    context.time_base = 1 / settings.fps
    context.gop_size = latency.gop
    tag_bt709(context)
    if settings.codec == "hevc":
        context.codec_tag = "hvc1"
    return stream


def tag_bt709(context: Any) -> None:
    """Tag an ``av`` video codec context as BT.709 colours in limited range (the codes of ITU-T H.273)."""
    context.colorspace = context.color_primaries = context.color_trc = 1
    context.color_range = 1
