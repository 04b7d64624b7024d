"""Putting bytes where they belong: modules on a device for a while, tensors beside it, copies between."""

from .offload import OffloadMemory, copy_across
from .resident import resident

__all__ = ["OffloadMemory", "copy_across", "resident"]
