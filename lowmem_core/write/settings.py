"""What a video file should be: frame rate, codec, quality, metadata and sound."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from ..errors import RequestError
from .audio import AudioTrack

MIN_FPS, MAX_FPS = Fraction(1, 1000), 1000
PRESETS = ("ultrafast", "superfast", "veryfast", "faster", "fast", "medium", "slow", "slower", "veryslow")
MAX_CRF = {"h264": 51, "hevc": 51, "av1": 63}
BIT_DEPTHS = (8, 10)

_NTSC_RATES = (24, 30, 48, 60, 72, 96, 120, 240)
_NTSC_TOLERANCE = Fraction(5, 1000)
_MAX_DENOMINATOR = 10_000


def parse_fps(value: str | int | float | Fraction) -> Fraction:
    """Read a frame rate: ``24``, ``"12.5"``, ``"24000/1001"`` or a rounded NTSC rate such as ``23.976``.

    Rates within 0.005 of 24, 30, 48, 60, ... times 1000/1001 become exactly that, so ``29.97`` is
    ``30000/1001``. A rate that is written as a fraction is taken as it stands.

    Raises:
        RequestError: The rate is not a number, below 0.001 or above 1000.
    """
    rate = _exact(value)
    if rate is None or not MIN_FPS <= rate <= MAX_FPS:
        raise RequestError(
            "cannot use the frame rate",
            need=f"a number of frames per second above 0 and up to {MAX_FPS}",
            have=repr(value),
            remedy='Write for example 24, 23.976 or "24000/1001".',
        )
    if isinstance(value, Fraction) or (isinstance(value, str) and "/" in value):
        return rate
    for base in _NTSC_RATES:
        ntsc = Fraction(base * 1000, 1001)
        if rate != base and abs(rate - ntsc) <= _NTSC_TOLERANCE:
            return ntsc
    return rate.limit_denominator(_MAX_DENOMINATOR)


def _exact(value: object) -> Fraction | None:
    """Return ``value`` as a fraction, or None if it is no finite number."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float, Fraction)):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    try:
        return Fraction(value.strip()) if isinstance(value, str) else Fraction(value)
    except (ValueError, ZeroDivisionError):
        return None


@dataclass(frozen=True)
class VideoSettings:
    """How a video is encoded, checked when it is made.

    Attributes:
        fps: Frames per second; see ``parse_fps``.
        codec: ``"h264"``, ``"hevc"`` or ``"av1"``.
        crf: Constant quality, smaller is better: 0..51, for av1 0..63.
        preset: Speed against size, x264's names from ``"ultrafast"`` to ``"veryslow"``.
        bit_depth: 8 or 10 bits per sample; 10 are quantised from the float frames.
        metadata: Container tags, for example ``prompt`` and ``workflow`` with JSON text as ComfyUI writes it.
        audio: Sound, cut or padded with silence to the length of the video.
        keep_partial: Whether a playable part stays when the video cannot be finished.

    Raises:
        RequestError: One of the values cannot work.
    """

    fps: Fraction
    codec: str = "h264"
    crf: int = 18
    preset: str = "medium"
    bit_depth: int = 8
    metadata: Mapping[str, str] = field(default_factory=dict)
    audio: AudioTrack | None = None
    keep_partial: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "fps", parse_fps(self.fps))
        _require_one_of("codec", self.codec, tuple(MAX_CRF))
        _require_one_of("preset", self.preset, PRESETS)
        _require_one_of("bit depth", self.bit_depth, BIT_DEPTHS)
        if not 0 <= self.crf <= MAX_CRF[self.codec]:
            raise RequestError(
                "the quality (crf) is out of range",
                need=f"0 to {MAX_CRF[self.codec]} for {self.codec}",
                have=str(self.crf),
                remedy="Use 18 for visually lossless h264, more for smaller files.",
            )
        for key, text in self.metadata.items():
            if not (isinstance(key, str) and key and isinstance(text, str)):
                raise RequestError(
                    "the metadata cannot be stored in a video",
                    need="text for every key and value",
                    have=f"{key!r}: {type(text).__name__}",
                    remedy="Turn values into text with json.dumps first.",
                )


def _require_one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise RequestError unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise RequestError(
            f"unknown {name}",
            need="one of " + ", ".join(str(item) for item in allowed),
            have=repr(value),
            remedy=f"Use for example {allowed[0]}.",
        )
