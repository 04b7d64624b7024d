"""The file a video lives in while it is written: next to its target, append-only, under a name of its own."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ..errors import RequestError, WriteError

SUFFIX = ".mp4"
_MAX_PARTS = 1000


def check_target(path: Path) -> None:
    """Check that a video can be written to ``path``, leaving nothing behind.

    Raises:
        RequestError: The name or the folder cannot work.
        WriteError: The folder cannot be written to.
    """
    if path.suffix.lower() != SUFFIX:
        raise _bad_target("the file name does not end in .mp4", "a name such as clip.mp4", path.name)
    if not path.parent.is_dir():
        raise _bad_target("the folder does not exist", "an existing folder", str(path.parent))
    if path.is_dir():
        raise _bad_target("the file name is that of a folder", "a file name", str(path))
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise WriteError(
            "the folder cannot be written to",
            need=f"permission to create files in {path.parent}",
            have=str(error),
            remedy="Choose another folder or change its permissions.",
        ) from error


def _bad_target(problem: str, need: str, have: str) -> RequestError:
    """Return the error for a target that cannot work."""
    return RequestError(problem, need=need, have=have, remedy="Choose another file name.")


def draft_of(part: Path) -> Path:
    """Return the name of the finished file before it replaces its target; it belongs to ``part``'s owner."""
    return part.with_name(part.name + ".tmp")


class PartFile:
    """A file that only grows, and takes all bytes it is given or raises ``OSError``.

    The object is what ``av`` writes to. It is unbuffered, so what it took survives the process.

    Args:
        path: A file that does not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._raw = open(path, "xb", buffering=0)  # noqa: SIM115

    @classmethod
    def beside(cls, target: Path) -> PartFile:
        """Create ``<stem>.partial.mp4`` next to ``target``, or ``<stem>.partial-2.mp4`` and so on if taken."""
        for number in range(1, _MAX_PARTS):
            mark = "partial" if number == 1 else f"partial-{number}"
            try:
                return cls(target.with_name(f"{target.stem}.{mark}{SUFFIX}"))
            except FileExistsError:
                continue
        raise WriteError(
            "there are too many unfinished videos",
            need=f"fewer than {_MAX_PARTS} files named {target.stem}.partial-*.mp4",
            have=str(_MAX_PARTS),
            remedy="Remove those you do not need.",
        )

    def write(self, data: bytes) -> int:
        """Append ``data`` and return its length; a full disk that takes half of it raises."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._raw.write(rest) :]
        return len(data)

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._raw.closed

    def close(self) -> None:
        """Close the file; closing it again does nothing."""
        self._raw.close()
