"""Sound for a video: the waveform, and its AAC packets in step with the frames."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from ._av import load_av

if TYPE_CHECKING:
    import torch

AAC_RATES = (7350, 8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000, 64000, 88200, 96000)
LAYOUTS = {1: "mono", 2: "stereo", 6: "5.1"}
BITS_PER_CHANNEL = 96_000


@dataclass(frozen=True, eq=False)
class AudioTrack:
    """Sound that starts with the first frame.

    Attributes:
        waveform: ``[C, S]`` or ``[1, C, S]`` floating point in -1..1 on any device; C is 1, 2 or 6.
        sample_rate: Samples per second, one that AAC knows (8000 to 96000).

    Raises:
        RequestError: The waveform or the rate cannot be stored.
    """

    waveform: torch.Tensor
    sample_rate: int

    def __post_init__(self) -> None:
        shape = tuple(self.waveform.shape)
        if len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] != 1):
            raise _bad_sound("shape [channels, samples] or [1, channels, samples]", f"{list(shape)}")
        if shape[-2] not in LAYOUTS or shape[-1] == 0:
            raise _bad_sound("1, 2 or 6 channels and at least one sample", f"{list(shape)}")
        if not self.waveform.is_floating_point():
            raise _bad_sound("floating-point samples in -1..1", str(self.waveform.dtype))
        if not bool(self.waveform.isfinite().all()):
            raise _bad_sound("finite samples", "NaN or infinity")
        if self.sample_rate not in AAC_RATES:
            rates = ", ".join(str(rate) for rate in AAC_RATES)
            raise _bad_sound(f"a sample rate of {rates} Hz", f"{self.sample_rate} Hz")

    @property
    def channels(self) -> int:
        """Number of channels."""
        return int(self.waveform.shape[-2])

    def samples(self, start: int, stop: int) -> torch.Tensor:
        """Return samples ``start`` to ``stop`` as ``[C, stop - start]`` float32 on the CPU, silent past the end."""
        import torch

        sound = self.waveform.reshape(self.channels, -1)[:, start:stop].detach().to("cpu", torch.float32)
        return torch.nn.functional.pad(sound, (0, stop - start - sound.shape[1]))


def _bad_sound(need: str, have: str) -> RequestError:
    """Return the error for a sound that cannot be stored."""
    return RequestError(
        "the sound cannot be stored in an MP4",
        need=need,
        have=have,
        remedy="Convert the sound first, or leave it out.",
    )


class AudioFeeder:
    """Encodes the sound of a video piece by piece, so that neither stream waits for the other.

    Args:
        container: The open ``av`` output container; the stream is added to it.
        track: The sound.
        fps: Frames per second of the video.
    """

    def __init__(self, container: Any, track: AudioTrack, fps: Fraction) -> None:
        self._track = track
        self._fps = fps
        self._done = 0
        self._stream = container.add_stream("aac", rate=track.sample_rate)
        self._stream.layout = LAYOUTS[track.channels]
        self._stream.bit_rate = BITS_PER_CHANNEL * track.channels

    def up_to_frame(self, frames: int) -> list[Any]:
        """Return the packets of the sound that belongs to the first ``frames`` frames and is not out yet."""
        stop = round(frames * self._track.sample_rate / self._fps)
        if stop <= self._done:
            return []
        sound = self._track.samples(self._done, stop)
        piece = load_av().AudioFrame.from_ndarray(
            sound.contiguous().numpy(), format="fltp", layout=LAYOUTS[self._track.channels]
        )
        piece.sample_rate = self._track.sample_rate
        piece.time_base = Fraction(1, self._track.sample_rate)
        piece.pts = self._done
        self._done = stop
        return list(self._stream.encode(piece))

    def flush(self) -> list[Any]:
        """Return the last packets."""
        return list(self._stream.encode(None))
