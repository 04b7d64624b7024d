"""What the core asks of the program around it, as small protocols, each with a plain implementation.

ComfyUI implements them in ``nodes/_comfy_host.py``; the shell and the tests use the classes below.
A function takes only the protocol it needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Progress(Protocol):
    """Somewhere to show how far a run is."""

    def update(self, done: int, total: int, phase: str) -> None:
        """Report that ``done`` of ``total`` units of ``phase`` are finished."""

    def preview(self, frame: torch.Tensor) -> None:
        """Show one frame, ``[H, W, 3]`` float RGB in 0..1 on the CPU."""


class Interrupt(Protocol):
    """The user's stop button."""

    def check(self) -> None:
        """Raise the host's own exception if the user asked to stop; else return at once."""


class Devices(Protocol):
    """The device that computes, and who else lives on it."""

    @property
    def compute(self) -> torch.device:
        """The device that computes."""

    def free_bytes(self) -> int | None:
        """Return the bytes that can be allocated on ``compute`` now, or None if it cannot be known."""

    def make_room(self, nbytes: int) -> None:
        """Ask the host to evict its own models until ``nbytes`` are free; a hint, never an error."""


class Folders(Protocol):
    """Where files may be written and models are found."""

    @property
    def output(self) -> Path:
        """The folder that keeps results."""

    @property
    def temp(self) -> Path:
        """The folder that is emptied by the host."""


class SilentProgress:
    """Shows nothing."""

    def update(self, done: int, total: int, phase: str) -> None:
        """Ignore the report."""

    def preview(self, frame: torch.Tensor) -> None:
        """Ignore the frame."""


class NeverInterrupt:
    """Never stops."""

    def check(self) -> None:
        """Return at once."""


class PlainDevices:
    """One torch device, shared with nobody we could ask to leave.

    Args:
        device: A torch device or its name.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        import torch

        self._device = torch.device(device)

    @property
    def compute(self) -> torch.device:
        """The device that computes."""
        return self._device

    def free_bytes(self) -> int | None:
        """Return free CUDA bytes, including what the allocator caches; None on other devices."""
        import torch

        if self._device.type != "cuda" or not torch.cuda.is_available():
            return None
        free, _ = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(free + cached)

    def make_room(self, nbytes: int) -> None:
        """Return the allocator's cached blocks to the driver when they would help."""
        import torch

        if self._device.type == "cuda" and torch.cuda.is_available():
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Host:
    """The bundle of services that only the pipeline sees."""

    devices: Devices
    progress: Progress = field(default_factory=SilentProgress)
    interrupt: Interrupt = field(default_factory=NeverInterrupt)
