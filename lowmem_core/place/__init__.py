"""Putting bytes where they belong: modules on a device for a while, tensors beside it, copies between."""

from .layout import inventory_of
from .offload import OffloadMemory, copy_across
from .resident import resident
from .streamer import StreamedModule, StreamOptions, StreamStatistics, WeightStreamer, streamed

__all__ = [
    "OffloadMemory",
    "StreamOptions",
    "StreamStatistics",
    "StreamedModule",
    "WeightStreamer",
    "copy_across",
    "inventory_of",
    "resident",
    "streamed",
]
