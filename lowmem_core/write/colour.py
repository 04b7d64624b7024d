"""From float RGB to the BT.709 limited-range YUV 4:2:0 that players expect."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

from ..frames import to_uint8
from ._av import load_av
from .encoders import PIXEL_FORMATS

if TYPE_CHECKING:
    import torch

_BT709, _FULL, _LIMITED = 1, 2, 1
# White in FFmpeg's 16-bit RGB is 255 << 8: with 65535 it would come out 3 levels of 10 bits too bright.
_LEVELS_16 = 65280.0
# SWS_BICUBIC, SWS_FULL_CHR_H_INP and SWS_ACCURATE_RND of FFmpeg's public header: all chroma read, exact rounding.
_SCALER_FLAGS = 0x4 | 0x4000 | 0x40000


class ColourConverter:
    """Turns frames of one video into ``av`` frames; keeps its scaler between calls.

    Args:
        fps: Frames per second, for the time stamps.
        bit_depth: 8 goes through 8-bit RGB, 10 through 16-bit RGB.
    """

    def __init__(self, fps: Fraction, bit_depth: int) -> None:
        from av.video.reformatter import VideoReformatter

        self._scaler = VideoReformatter()
        self._time_base = 1 / fps
        self._bit_depth = bit_depth

    def convert(self, pixels: torch.Tensor, index: int) -> Any:
        """Return frame ``index`` of the video from ``pixels``, ``[H, W, 3]`` float RGB on the CPU.

        Values outside 0..1 are clamped.
        """
        frame = self._rgb(pixels)
        frame = self._scaler.reformat(
            frame,
            format=PIXEL_FORMATS[self._bit_depth],
            dst_colorspace=_BT709,
            src_color_range=_FULL,
            dst_color_range=_LIMITED,
            interpolation=_SCALER_FLAGS,
        )
        frame.pts = index
        frame.time_base = self._time_base
        return frame

    def _rgb(self, pixels: torch.Tensor) -> Any:
        """Return ``pixels`` quantised to 8 or 16 bits as a full-range RGB frame."""
        import torch

        pixels = pixels.to(torch.float32)
        av = load_av()
        if self._bit_depth == 8:
            return av.VideoFrame.from_ndarray(to_uint8(pixels).contiguous().numpy(), format="rgb24")
        levels = pixels.mul(_LEVELS_16).round_().clamp_(0.0, _LEVELS_16).to(torch.int32)
        return av.VideoFrame.from_ndarray(levels.contiguous().numpy().astype("<u2"), format="rgb48le")
