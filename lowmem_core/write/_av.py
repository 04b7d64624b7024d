"""The one door to PyAV: the import, and the names of what it can raise."""

from __future__ import annotations

from typing import Any

from ..errors import MissingDependencyError


def load_av() -> Any:
    """Return the ``av`` module.

    Raises:
        MissingDependencyError: PyAV is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise MissingDependencyError(
            "writing and reading video files needs PyAV",
            need="the package av, 14.2 or newer",
            have=str(error),
            remedy='Install it with: pip install "av>=14.2".',
        ) from error
    return av


def file_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that mean "this file or encoder failed", for an ``except`` clause."""
    return (OSError, load_av().FFmpegError)
