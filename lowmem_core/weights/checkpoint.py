"""A checkpoint of any form as names, shapes and dtypes, with the bytes of a tensor read only when asked.

Forms: one ``.safetensors`` file, one GGUF file, one PyTorch file, a diffusers folder (``config.json`` beside one
safetensors file or a sharded index), or a state dict that the host already holds.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import CheckpointError
from .gguf_file import GgufFile
from .safetensors_file import SafetensorsFile
from .tensor_info import TensorInfo, TensorLocation
from .tensor_mapping import TensorMapping, checked_tensors, read_torch_file

if TYPE_CHECKING:
    from torch import Tensor

TORCH_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt")


class _Part(Protocol):
    """One file, or one mapping, of a checkpoint."""

    infos: dict[str, TensorInfo]

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield ``(name, tensor)`` for ``names``."""

    def location(self, name: str) -> TensorLocation | None:
        """Return where the bytes of tensor ``name`` are in a file, or None."""


class Checkpoint(Mapping[str, TensorInfo]):
    """What a checkpoint holds: a mapping from tensor names to their shape and dtype.

    Attributes:
        source: The path or name to show in messages.
        config: The ``config.json`` of a diffusers folder; empty for every other form.
    """

    def __init__(self, parts: Iterable[_Part], source: str, config: Mapping[str, Any] | None = None) -> None:
        self.source = source
        self.config: Mapping[str, Any] = config or {}
        self._parts: dict[str, _Part] = {}
        for part in parts:
            for name in part.infos:
                if name in self._parts:
                    raise CheckpointError(f"{source} holds tensor {name!r} twice", remedy="Download it again.")
                self._parts[name] = part

    @classmethod
    def open(cls, path: Path | str) -> Checkpoint:
        """Read the headers of the checkpoint at ``path``.

        Raises:
            CheckpointError: There is nothing there, or it is damaged or of an unknown form.
        """
        path = Path(path)
        if path.is_dir():
            return cls(_folder_parts(path), str(path), _read_json(path / "config.json"))
        return cls([_open_file(path)], str(path))

    @classmethod
    def open_safetensors(cls, path: Path | str) -> Checkpoint:
        """Read the header of a safetensors file of any suffix, such as ComfyUI's ``.latent``.

        Raises:
            CheckpointError: There is nothing there, or it is damaged.
        """
        path = Path(path)
        _check_is_file(path)
        return cls([SafetensorsFile(path)], str(path))

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], source_name: str) -> Checkpoint:
        """Wrap a state dict in memory, without copying it.

        Raises:
            CheckpointError: A value is not a tensor, or there is none.
        """
        return cls([TensorMapping(checked_tensors(tensors, source_name))], source_name)

    def __getitem__(self, name: str) -> TensorInfo:
        return self._part_of(name).infos[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        return {name: self[name].shape for name in self}

    def part(self, prefix: str) -> Checkpoint:
        """Return the same checkpoint seen through the tensors whose names start with ``prefix`` (kept in them)."""
        seen = Checkpoint([], self.source, self.config)
        seen._parts = {name: part for name, part in self._parts.items() if name.startswith(prefix)}
        return seen

    def without(self, names: Container[str]) -> Checkpoint:
        """Return the same checkpoint without the tensors called ``names``."""
        seen = Checkpoint([], self.source, self.config)
        seen._parts = {name: part for name, part in self._parts.items() if name not in names}
        return seen

    def location(self, name: str) -> TensorLocation | None:
        """Return where the bytes of tensor ``name`` are, or None where they are not in one piece of a file.

        Raises:
            CheckpointError: There is no such tensor.
        """
        return self._part_of(name).location(name)

    def read(self, name: str) -> Tensor:
        """Return tensor ``name``: mapped from its file on the CPU, or the host's own tensor.

        Raises:
            CheckpointError: There is no such tensor, or the file can no longer be read.
        """
        return dict(self.read_many([name]))[name]

    def read_many(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield ``(name, tensor)`` for ``names``, each file opened once; the order is that of the files.

        Raises:
            CheckpointError: There is no such tensor, or a file can no longer be read.
        """
        wanted: dict[int, tuple[_Part, list[str]]] = {}
        for name in names:
            part = self._part_of(name)
            wanted.setdefault(id(part), (part, []))[1].append(name)
        for part, part_names in wanted.values():
            yield from part.read(part_names)

    def _part_of(self, name: str) -> _Part:
        """Return the part that holds ``name``."""
        if name not in self._parts:
            raise CheckpointError(f"{self.source} holds no tensor {name!r}", have=f"{len(self)} other tensors")
        return self._parts[name]


def _open_file(path: Path) -> _Part:
    """Return the tensors of one file, told by its suffix."""
    _check_is_file(path)
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    if path.suffix == ".gguf":
        return GgufFile(path)
    if path.suffix in TORCH_SUFFIXES:
        return read_torch_file(path)
    raise CheckpointError(
        f"cannot tell the form of {path}",
        need=".safetensors, .gguf, " + ", ".join(TORCH_SUFFIXES) + " or a diffusers folder",
        have=path.suffix or "no suffix",
    )


def _check_is_file(path: Path) -> None:
    """Raise CheckpointError unless ``path`` is a file."""
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}", remedy="Check the path.")


def _folder_parts(folder: Path) -> list[_Part]:
    """Return the files of a diffusers folder."""
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    files = sorted(folder.glob("*.safetensors"))
    if len(indexes) == 1:
        return _sharded_parts(indexes[0])
    if not indexes and len(files) == 1:
        return [SafetensorsFile(files[0])]
    raise CheckpointError(
        f"cannot tell which weights of {folder} to load",
        need="one .safetensors file, or one .safetensors.index.json",
        have=", ".join(path.name for path in [*indexes, *files][:4]) or "none",
        remedy="Give the path of the file itself, or keep one set of weights in the folder.",
    )


def _sharded_parts(index: Path) -> list[_Part]:
    """Return the shards that ``index`` names, after checking that they hold what it says."""
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} names no tensors", need="a weight_map", remedy="Download it again.")
    shards: dict[str, SafetensorsFile] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or file_name != Path(file_name).name or "\\" in file_name:
            raise CheckpointError(f"{index} names a file outside its folder", have=repr(file_name))
        if file_name not in shards:
            path = index.parent / file_name
            if not path.is_file():
                raise CheckpointError(f"shard {path} is missing", need=f"it holds tensor {name!r}")
            shards[file_name] = SafetensorsFile(path)
        if name not in shards[file_name].infos:
            raise CheckpointError(f"tensor {name!r} is not in {index.parent / file_name}, where {index.name} puts it")
    return list(shards.values())


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``."""
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}", need=f"a diffusers model folder with {path.name}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}", have=str(error), remedy="Download it again.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not a JSON object", have=type(found).__name__)
    return found
