"""Embeds kept on disk, so that a prompt is encoded once: a folder with a limit on its bytes.

The name of an entry is a hash of all that decides its bits. An entry that cannot be read, or is not what was written,
counts as absent and is written anew. Processes may share the folder: an entry is whole or not there, and one that
vanishes meanwhile is encoded again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ..denoise import tensor_sha256
from ..errors import LowmemError, RequestError
from ..units import GiB
from ..weights import Checkpoint
from ..weights.safetensors_write import TEMPORARY, write_tensors

DEFAULT_CACHE_BYTES = 1 * GiB
_VERSION = 1
_SUFFIX = ".embeds.safetensors"
_EMBEDS, _CHECK = "embeds", "sha256."
_STALE_S = 3600.0
_log = logging.getLogger("lowmem")


class EmbedsCache:
    """Embeds of single prompts.

    Args:
        folder: Where; made when needed.
        cap_bytes: How much all entries may take; those that were not used for longest are removed first.

    Raises:
        RequestError: The limit is not positive.
    """

    def __init__(self, folder: Path | str, cap_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        if cap_bytes <= 0:
            raise RequestError("the limit of cached embeds must be positive", need="bytes", have=str(cap_bytes))
        self.folder = Path(folder)
        self.cap_bytes = cap_bytes

    def get(self, key: str) -> Tensor | None:
        """Return the embeds under ``key``, independent of their file, or None; what was used stays longer."""
        path = self._path(key)
        if not path.is_file():
            return None
        try:
            embeds = _read(path)
        except (LowmemError, OSError, ValueError) as error:
            _log.warning("ignoring the cached embeds %s, which are damaged: %s", path.name, error)
            return None
        try:
            os.utime(path)
        except OSError:
            _log.debug("the cached embeds %s cannot be marked as used", path.name)
        return embeds

    def put(self, key: str, embeds: Tensor) -> None:
        """Keep ``embeds`` under ``key``, and remove what is beyond the limit.

        Raises:
            WriteError: The folder cannot be written to.
        """
        path = self._path(key)
        write_tensors(path, {_EMBEDS: embeds, _CHECK + tensor_sha256(embeds): embeds.new_zeros(0)})
        self._make_room(path)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _make_room(self, latest: Path) -> None:
        """Remove what killed writers left, and the entries beyond the limit, the latest last."""
        for left in self.folder.glob(f"{TEMPORARY}*"):
            if time.time() - _used_ns(left) / 1e9 > _STALE_S:
                _remove(left)
        entries = sorted(self.folder.glob(f"*{_SUFFIX}"), key=lambda path: (path == latest, _used_ns(path), path.name))
        sizes = {path: _size(path) for path in entries}
        excess = sum(sizes.values()) - self.cap_bytes
        for path, size in sizes.items():
            if excess <= 0:
                break
            _remove(path)
            excess -= size


def cache_key(identity: Mapping[str, object]) -> str:
    """Return the name of an entry: a hash of plain values, and of the format of entries."""
    text = json.dumps({"version": _VERSION, **identity}, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _read(path: Path) -> Tensor:
    """Return a copy of the embeds in ``path`` after comparing them with what was written."""
    entry = Checkpoint.open_safetensors(path)
    embeds = entry.read(_EMBEDS).clone()
    if _CHECK + tensor_sha256(embeds) not in entry:
        raise ValueError("their values are not those that were written")
    return embeds


def _remove(path: Path) -> None:
    """Remove a file, if another process does not hold it or has not removed it."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.debug("%s stays for now: %s", path.name, error)


def _used_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
