"""Where streamed weights wait: host memory as they are, pinned host memory, or the weight files on disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO, Protocol

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..units import format_bytes
from ..weights import TensorLocation
from .layout import Entry, Unit

_log = logging.getLogger(__name__)
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class WeightSource(Protocol):
    """Gives the bytes of weights that are not on the device. Called from one reader thread and the main thread."""

    kind: str

    def write_entry(self, entry: Entry, target: Tensor) -> None:
        """Copy one tensor to ``target``, on any device, of the entry's dtype and shape."""

    def packed(self, unit: Unit) -> Tensor | None:
        """Return the unit as one pinned allocation, or None if it must be written entry by entry."""

    def close(self) -> None:
        """Release what was opened or allocated."""


class HostSource:
    """The module's own tensors in host memory, mapped files included.

    Args:
        originals: What each parameter held before placement, by ``id`` of the parameter.
    """

    kind = "host"

    def __init__(self, originals: Mapping[int, Tensor]) -> None:
        self._originals = originals

    def write_entry(self, entry: Entry, target: Tensor) -> None:
        """Copy the tensor."""
        target.copy_(self._originals[id(entry.tensor)])

    def packed(self, unit: Unit) -> Tensor | None:
        """Return None: tensors lie apart."""
        return None

    def close(self) -> None:
        """Forget the tensors."""
        self._originals = {}


class PinnedSource(HostSource):
    """Blocks packed in pinned memory once, so that each later copy is a single asynchronous one.

    A refused pinned allocation leaves its block, and all later ones, in plain host memory, with one warning.
    """

    kind = "pinned"

    def __init__(
        self,
        originals: Mapping[int, Tensor],
        mark_host: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__(originals)
        self._mark_host = mark_host
        self._slabs: dict[int, Tensor] = {}
        self._refused = False
        self.pinned_bytes = 0

    def packed(self, unit: Unit) -> Tensor | None:
        """Return the unit in pinned memory, packing it the first time."""
        key = id(unit)
        if key not in self._slabs and not self._refused:
            self._pack(unit, key)
        return self._slabs.get(key)

    def _pack(self, unit: Unit, key: int) -> None:
        try:
            with self._mark_host(), torch.inference_mode(False):
                slab = torch.empty(unit.nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            self._refused = True
            _log.warning("pinned memory was refused (%s): going on with plain host memory", error)
            return
        for entry in unit.entries:
            self.write_entry(entry, entry.view(slab))
        self._slabs[key] = slab
        self.pinned_bytes += unit.nbytes

    def close(self) -> None:
        """Free the pinned memory."""
        super().close()
        self._slabs.clear()


class DiskSource:
    """Weights read from their files each time, so that host memory holds none of them.

    Tensors that no file holds, such as those of a LoRA, are taken from host memory.

    Args:
        locations: Where the bytes of each tensor of the module are, by name.
        originals: What each parameter held before placement, by ``id`` of the parameter.
        mark_host: Context in which allocations count as host memory.
    """

    kind = "disk"

    def __init__(
        self,
        locations: Mapping[str, TensorLocation],
        originals: Mapping[int, Tensor],
        mark_host: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._locations = locations
        self._mark_host = mark_host
        self._host = HostSource(originals)
        self._files: dict[Path, BinaryIO] = {}
        self._lock = threading.Lock()

    def write_entry(self, entry: Entry, target: Tensor) -> None:
        """Read the tensor, straight into ``target`` where that is possible.

        Raises:
            CheckpointError: The file cannot be read, or ends early.
        """
        location = self._locations.get(entry.name)
        if location is None:
            self._host.write_entry(entry, target)
            return
        dtype = _DTYPES[location.dtype]
        if target.device.type == "cpu" and dtype == target.dtype and target.is_contiguous():
            self._read(location, target)
            return
        with self._mark_host():
            scratch = torch.empty(location.shape, dtype=dtype)
        self._read(location, scratch)
        target.copy_(scratch.view(target.shape))

    def packed(self, unit: Unit) -> Tensor | None:
        """Return None: nothing is kept."""
        return None

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()
        self._host.close()

    def _read(self, location: TensorLocation, target: Tensor) -> None:
        if not location.nbytes:
            return
        buffer = memoryview(target.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        try:
            with self._lock:
                file = self._files.get(location.path)
                if file is None:
                    file = self._files[location.path] = location.path.open("rb", buffering=0)
                file.seek(location.offset)
                done = 0
                while done < location.nbytes and (got := file.readinto(buffer[done:])):  # type: ignore[attr-defined]
                    done += got
        except OSError as error:
            raise CheckpointError(f"cannot read {location.path}", have=str(error)) from error
        if done < location.nbytes:
            raise CheckpointError(
                f"{location.path} ended while it was read",
                need=f"{format_bytes(location.nbytes)} at byte {location.offset}",
                have=format_bytes(done),
                remedy="The file changed or was cut off: put it back and run again.",
            )
