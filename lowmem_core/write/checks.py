"""What is asked of every chunk before one of its frames is encoded."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..errors import RequestError
from ..frames import FrameChunk
from ..shapes import VideoShape

if TYPE_CHECKING:
    import torch

CHANNELS = 3


class ChunkOrder:
    """Checks shapes, types and order of the chunks of one video; reads no pixel.

    Args:
        expected_frames: Length of the video, or None if it is not known.

    Attributes:
        frames: Frames accepted so far.
        size: ``(height, width)`` of the video, or None before the first chunk.
    """

    def __init__(self, expected_frames: int | None) -> None:
        self._expected = expected_frames
        self.frames = 0
        self.size: tuple[int, int] | None = None

    def accept(self, chunk: FrameChunk) -> None:
        """Take note of ``chunk``.

        Raises:
            RequestError: It cannot be the next part of this video.
        """
        height, width = _frame_size(chunk.frames)
        if self.size is not None and self.size != (height, width):
            need = f"{self.size[1]}x{self.size[0]} as in the frames before"
            raise _bad_chunk("the frames change their size", need, f"{width}x{height}")
        if chunk.first_frame != self.frames:
            have = f"frame {chunk.first_frame}"
            raise _bad_chunk("the frames are not in order", f"frame {self.frames} next", have)
        if self._expected is not None and self.frames + chunk.count > self._expected:
            have = f"at least {self.frames + chunk.count}"
            raise _bad_chunk("there are too many frames", str(self._expected), have)
        self.size = (height, width)
        self.frames += chunk.count

    def finished(self) -> VideoShape:
        """Return the size of the whole video.

        Raises:
            RequestError: No frame came, or fewer than expected.
        """
        if self.size is None or (self._expected is not None and self.frames < self._expected):
            need = "at least one frame" if self._expected is None else f"{self._expected} frames"
            raise _bad_chunk("the video ends too early", need, f"{self.frames} frames")
        return VideoShape(self.frames, *self.size)


def check_finite(chunk: FrameChunk) -> None:
    """Raise RequestError if a frame of ``chunk`` holds NaN or infinity; needs no memory of its size."""
    for offset, frame in enumerate(chunk.frames):
        low, high = (float(value) for value in frame.aminmax())
        if not (math.isfinite(low) and math.isfinite(high)):
            index = chunk.first_frame + offset
            raise RequestError(
                f"frame {index} holds NaN or infinity and would be black",
                need="finite values in 0..1",
                have=f"values from {low} to {high}",
                remedy="Decode with float32 or bfloat16 weights; float16 VAEs are known to overflow.",
            )


def _frame_size(frames: torch.Tensor) -> tuple[int, int]:
    """Return ``(height, width)`` of a chunk's frames after checking that they can be encoded."""
    shape = tuple(int(side) for side in frames.shape)
    if len(shape) != 4 or shape[3] != CHANNELS or 0 in shape:
        need = "[frames, height, width, 3], none of them 0"
        raise _bad_chunk("the frames have the wrong shape", need, str(list(shape)))
    if not frames.is_floating_point():
        raise _bad_chunk("the frames have the wrong type", "floating point in 0..1", str(frames.dtype))
    if frames.device.type != "cpu":
        raise _bad_chunk("the frames are not in main memory", "a CPU tensor", str(frames.device))
    if shape[1] % 2 or shape[2] % 2:
        raise RequestError(
            "4:2:0 video cannot have an odd side",
            need="an even width and height",
            have=f"{shape[2]}x{shape[1]}",
            remedy=f"Crop or pad, for example to {shape[2] & ~1}x{shape[1] & ~1}.",
        )
    return shape[1], shape[2]


def _bad_chunk(problem: str, need: str, have: str) -> RequestError:
    """Return the error for frames that cannot be the next part of a video."""
    return RequestError(problem, need=need, have=have, remedy="Check what produces the frames.")
