"""A folder of unfinished runs: one file each, whole or not there, with a limit on the bytes of all.

A file is written under a temporary name, flushed to the disk and renamed, so a process that is killed leaves either
the former state or the new one. A file that cannot be read costs the run its past, never its future: it is passed
over with a warning.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import RequestError
from ..units import GiB, format_bytes
from ..weights.safetensors_write import TEMPORARY, write_tensors
from .fingerprint import Fingerprint, tensor_sha256

STATE_VERSION = 1
DEFAULT_CAP_BYTES = 4 * GiB
_SUFFIX = ".run.safetensors"
_STALE_S = 3600.0
_FIELD = "lowmem_run"
_log = logging.getLogger("lowmem")


class RunInfo(NamedTuple):
    """An unfinished run, as a list shows it.

    Attributes:
        name: What to call it when removing it.
        step: Steps done.
        steps: Steps to do.
        created: When it was last saved, in seconds since 1970.
        nbytes: Size on disk.
        what: What it makes, as its request said.
    """

    name: str
    step: int
    steps: int
    created: float
    nbytes: int
    what: str


class SavedState(NamedTuple):
    """The tensors and plain values of a saved run; tensors on the CPU, independent of the file."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]


class RunStore:
    """Unfinished runs in a folder.

    Args:
        folder: Where; made when needed.
        cap_bytes: How much all of them may take. The oldest are removed first, the one just written never.
    """

    def __init__(self, folder: Path | str, cap_bytes: int = DEFAULT_CAP_BYTES) -> None:
        if cap_bytes <= 0:
            raise RequestError("the limit of saved runs must be positive", need="bytes", have=str(cap_bytes))
        self.folder = Path(folder)
        self.cap_bytes = cap_bytes

    def save(self, fingerprint: Fingerprint, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> Path:
        """Write the state of a run in place of its former one.

        Args:
            fingerprint: Which run.
            tensors: By name, on any device.
            values: Plain values; ``step`` and ``steps`` are shown in lists.

        Raises:
            WriteError: The folder cannot be written to.
        """
        header = {
            "version": STATE_VERSION,
            "key": fingerprint.key,
            "what": fingerprint.what,
            "created": time.time(),
            "values": dict(values),
            "sha256": _digest(tensors),
        }
        path = self._path(fingerprint.key)
        write_tensors(path, tensors, {_FIELD: json.dumps(header)})
        self._make_room(path)
        return path

    def load(self, fingerprint: Fingerprint) -> SavedState | None:
        """Return the state of a run, or None if there is none that can be used."""
        path = self._path(fingerprint.key)
        if not path.exists():
            return None
        try:
            header = _header(path)
            if header.get("version") != STATE_VERSION:
                _log.warning(
                    "ignoring the saved run %s: its format is version %s, this is version %s; it starts anew",
                    path.name,
                    header.get("version"),
                    STATE_VERSION,
                )
                return None
            tensors = _tensors(path)
            if header["key"] != fingerprint.key or header["sha256"] != _digest(tensors):
                raise ValueError("its content is not what was saved")
            return SavedState(tensors, dict(header["values"]))
        except Exception as error:  # whatever is wrong with the file, the run can start anew
            _log.warning("ignoring the saved run %s, which is damaged: %s; it starts anew", path.name, error)
            return None

    def remove(self, run: Fingerprint | str) -> bool:
        """Remove a run, given by fingerprint or by its name in the list; return whether there was one.

        Raises:
            RequestError: The name is not one of a list.
        """
        key = run.key if isinstance(run, Fingerprint) else run
        if not key.isalnum() or not key.isascii():
            raise RequestError("there is no saved run of this name", need="a name from the list", have=repr(key))
        path = self._path(key)
        existed = path.exists()
        path.unlink(missing_ok=True)
        return existed

    def list_runs(self) -> list[RunInfo]:
        """Return all runs, the latest first; damaged ones too, so that they can be removed."""
        infos = [info for path in self._files() if (info := _info(path)) is not None]
        return sorted(infos, key=lambda info: info.created, reverse=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob(f"*{_SUFFIX}")) if self.folder.is_dir() else []

    def _make_room(self, kept: Path) -> None:
        """Remove what killed writers left, and the oldest runs beyond the limit, but never ``kept``."""
        for path in self.folder.glob(f"{TEMPORARY}*"):
            if time.time() - _modified(path) > _STALE_S:
                path.unlink(missing_ok=True)
        sizes = {path: _size(path) for path in self._files()}
        excess = sum(sizes.values()) - self.cap_bytes
        for path in sorted(sizes, key=_modified):
            if excess > 0 and path != kept:
                path.unlink(missing_ok=True)
                _log.warning("removed the saved run %s: the folder is limited to %s", path.name, self._cap)
                excess -= sizes[path]
        if excess > 0:
            _log.warning("the saved run %s alone takes more than the limit of %s", kept.name, self._cap)

    @property
    def _cap(self) -> str:
        return format_bytes(self.cap_bytes)


def save_latents(path: Path | str, latents: Tensor, metadata: Mapping[str, str] | None = None) -> Path:
    """Save latents, whole or not at all, to be read again by ``read_latents`` and, as ``.latent``, by ComfyUI.

    Args:
        path: A ``.safetensors`` or ``.latent`` file; its folder is made if needed.
        latents: ``[B, C, F, H, W]``, any device; saved as float32.
        metadata: Kept in the file beside them.

    Raises:
        RequestError: The name has another ending.
        WriteError: It cannot be written.
    """
    path = Path(path)
    if path.suffix not in (".safetensors", ".latent"):
        raise RequestError("latents cannot be saved so", need="a name in .safetensors or .latent", have=path.name)
    tensors = {"latents": latents.float()}
    if path.suffix == ".latent":
        tensors = {"latent_tensor": latents.float(), "latent_format_version_0": latents.new_zeros(0).float()}
    write_tensors(path, tensors, metadata)
    return path


def _header(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(str(path), "pt") as file:
        header: dict[str, Any] = json.loads(file.metadata()[_FIELD])
    return header


def _tensors(path: Path) -> dict[str, Tensor]:
    """Return copies: the file is replaced while they live, and kernels give other bits for odd addresses."""
    from safetensors import safe_open

    with safe_open(str(path), "pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Return one hash over all tensors."""
    lines = [f"{name} {tensor_sha256(tensor)}" for name, tensor in sorted(tensors.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _info(path: Path) -> RunInfo | None:
    """Return what a list shows of a file, or None if it has just been removed."""
    name = path.name.removesuffix(_SUFFIX)
    try:
        header = _header(path)
        values = header["values"]
        step, steps = int(values.get("step", 0)), int(values.get("steps", 0))
        return RunInfo(name, step, steps, float(header["created"]), _size(path), str(header["what"]))
    except Exception:  # a list must show what can be removed, whatever is wrong with it
        return RunInfo(name, 0, 0, _modified(path), _size(path), "damaged") if path.exists() else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
