"""What makes two denoise runs the same request: files, settings and tensors, as one hash.

Weight files are known by name, size and time of last change; hashing tens of GiB before each run would cost minutes.
Tensors are known by their bytes. The name of everything that is stored for a run is the hash, so nothing that a user
typed becomes part of a path.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import RequestError

_KEY_DIGITS = 40


class FileMark(NamedTuple):
    """A file as far as its folder tells: a changed file has another mark."""

    name: str
    nbytes: int
    mtime_ns: int


class LoraUse(NamedTuple):
    """A LoRA on one of the transformers.

    Attributes:
        path: Its file.
        strength: How strongly it is applied.
        model: Which transformer, counted as in ``models``.
    """

    path: Path
    strength: float
    model: int = 0


@dataclass(frozen=True)
class Fingerprint:
    """Everything that decides the result of a run.

    Attributes:
        models: The weight files, in order.
        loras: Mark, strength and transformer of each, in order of application.
        settings: Canonical JSON.
        tensors: SHA-256 by name: embeds, noise or input latents, conditions.
        what: How to call the run in a list; not part of the identity.
    """

    models: tuple[FileMark, ...]
    loras: tuple[tuple[FileMark, float, int], ...]
    settings: str
    tensors: tuple[tuple[str, str], ...]
    what: str = ""

    @classmethod
    def of(
        cls,
        models: Sequence[Path],
        settings: Mapping[str, Any],
        tensors: Mapping[str, Tensor | None],
        loras: Sequence[LoraUse] = (),
        what: str = "",
    ) -> Fingerprint:
        """Mark a request.

        Args:
            models: Weight files, or folders of them.
            settings: Plain values: sampler, guidance, seed, size, dtype and so on.
            tensors: Whatever tensors the run starts from; those that are None do not count.
            loras: Those applied.
            what: How to call the run in a list.

        Raises:
            RequestError: A file is missing, or a setting is not a plain value.
        """
        return cls(
            tuple(mark for path in models for mark in file_marks(path)),
            tuple((mark, float(use.strength), use.model) for use in loras for mark in file_marks(use.path)),
            _canonical(settings),
            tuple((name, tensor_sha256(tensor)) for name, tensor in sorted(tensors.items()) if tensor is not None),
            what,
        )

    @property
    def key(self) -> str:
        """The identity, as hexadecimal digits."""
        identity = {name: value for name, value in asdict(self).items() if name != "what"}
        return hashlib.sha256(_canonical(identity).encode()).hexdigest()[:_KEY_DIGITS]


def file_marks(path: Path) -> list[FileMark]:
    """Return the mark of a file, or of each file of a folder.

    Raises:
        RequestError: There is no such file.
    """
    try:
        files = sorted(inner for inner in path.rglob("*") if inner.is_file()) if path.is_dir() else [path]
        return [FileMark(_name(file, path), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    except OSError as error:
        raise RequestError("cannot look at a model file", need="a readable file", have=str(error)) from error


def tensor_sha256(tensor: Tensor) -> str:
    """Return the SHA-256 of the type, shape and bytes of ``tensor``, wherever it is."""
    plain = tensor.detach().to("cpu").contiguous()
    digest = hashlib.sha256(f"{plain.dtype} {list(plain.shape)} ".encode())
    digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _name(file: Path, asked: Path) -> str:
    """Return the name of a file, with the folder that was asked for if it was one."""
    return asked.name if file == asked else f"{asked.name}/{file.relative_to(asked).as_posix()}"


def _canonical(value: object) -> str:
    """Return ``value`` as JSON that is the same for equal values."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RequestError("a setting cannot be fingerprinted", need="plain values", have=str(error)) from error
