"""What a decode may use of its surroundings."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..host import Devices, Interrupt, NeverInterrupt, PlainDevices, Progress, SilentProgress
from ..memory import MemoryMeter, NullMeter


@dataclass(frozen=True)
class DecodeServices:
    """What a decode may use of its surroundings.

    Attributes:
        devices: Where to compute.
        meter: Counts bytes, and may enforce a limit.
        interrupt: Polled before each tile.
        progress: Told after each tile.
        is_poisoned: Fill released cache tensors with NaN (tests).
    """

    devices: Devices = field(default_factory=PlainDevices)
    meter: MemoryMeter = field(default_factory=NullMeter)
    interrupt: Interrupt = field(default_factory=NeverInterrupt)
    progress: Progress = field(default_factory=SilentProgress)
    is_poisoned: bool = False
