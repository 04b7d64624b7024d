"""What the shell gives the pipeline: a device, a bar on stderr, no stop button but Ctrl-C."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ..host import Host, PlainDevices

if TYPE_CHECKING:
    import torch

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def device_of(name: str | None) -> torch.device:
    """Return the device that was asked for: by default cuda if there is one."""
    import torch

    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def dtype_of(name: str | None, device: torch.device) -> torch.dtype:
    """Return the dtype that was asked for: by default float32 on a processor and bfloat16 on a GPU."""
    import torch

    dtype: torch.dtype = getattr(torch, DTYPES[name or ("fp32" if device.type == "cpu" else "bf16")])
    return dtype


def shell_host(device: torch.device) -> Host:
    """Return the services of the shell."""
    return Host(PlainDevices(device), progress=_Bar(sys.stderr.isatty()))


class _Bar:
    """A progress bar on stderr."""

    def __init__(self, is_shown: bool) -> None:
        self._is_shown = is_shown

    def update(self, done: int, total: int, phase: str) -> None:
        """Redraw the bar."""
        if not self._is_shown:
            return
        filled = 30 * done // max(1, total)
        end = "\n" if done == total else ""
        print(f"\r{phase} [{'#' * filled}{'.' * (30 - filled)}] {done}/{total}", end=end, file=sys.stderr, flush=True)

    def preview(self, frame: torch.Tensor) -> None:
        """Ignore the frame."""
