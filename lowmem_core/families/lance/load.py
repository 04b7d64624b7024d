"""Load the towers of a Lance checkpoint: strictly, part by part, and only what an image from text needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from ...errors import CheckpointError
from ...load import StoredReader, assign_tensors, build_skeleton, target_dtypes
from ...load.rows import read_rows
from ...weights import Checkpoint, TensorLocation
from .config import LanceConfig
from .denoiser import Denoiser
from .keys import EMBEDDINGS, check_names, names_of

WEIGHT_FILES = ("model.safetensors", "ema.safetensors")
UND = "und"
GEN = "gen"
IO = "io"
PARTS = (UND, GEN, IO)


@dataclass(frozen=True)
class LanceCheckpoint:
    """A checkpoint whose names and shapes have been checked.

    Attributes:
        folder: Of the model, where its tokenizer is too.
        path: Its weight file.
        config: What it is built like.
        tensors: Its names and shapes.
    """

    folder: Path
    path: Path
    config: LanceConfig
    tensors: Checkpoint

    @classmethod
    def open(cls, folder: Path | str) -> LanceCheckpoint:
        """Open a model folder; of the weights only the header is read.

        Raises:
            CheckpointError: A file is missing or damaged, or its tensors are not those of the model.
        """
        folder = Path(folder)
        config = LanceConfig.read(folder)
        path = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
        if path is None:
            raise CheckpointError(
                f"there are no weights in {folder}",
                need=" or ".join(WEIGHT_FILES),
                remedy="Download the model again, whole.",
            )
        tensors = Checkpoint.open_safetensors(path)
        check_names(tensors.shapes(), config, str(path))
        return cls(folder, path, config, tensors)

    def embeds(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ``[n, D]`` on the CPU: the rows of the token table for ``ids`` ``[n]``, and nothing else of it.

        Raises:
            CheckpointError: There is no such token, or the file can no longer be read.
        """
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.config.vocabulary:
            raise CheckpointError(
                "the tokenizer has tokens that the model does not know",
                need=f"0 to {self.config.vocabulary - 1}",
                have=f"{int(ids.min())} to {int(ids.max())}",
                remedy="Use the tokenizer that came with the model.",
            )
        return read_rows(self.tensors, EMBEDDINGS, ids).to(dtype)


@dataclass(frozen=True)
class LoadedDenoiser:
    """Both towers on the processor, or described there with their bytes left on disk.

    Attributes:
        module: In eval mode, without gradients.
        checkpoint: Where they come from.
        dtype: What they compute in.
        locations: Where tensors are that were left on disk, by name; empty if none were.
    """

    module: Denoiser
    checkpoint: LanceCheckpoint
    dtype: torch.dtype
    locations: dict[str, TensorLocation] = field(default_factory=dict)

    def und_locations(self) -> dict[str, TensorLocation]:
        """Return where the tensors of the understanding tower are, by their names within it."""
        start = f"{UND}."
        return {name[len(start) :]: place for name, place in self.locations.items() if name.startswith(start)}


def load_lance(
    checkpoint: LanceCheckpoint,
    dtype: torch.dtype,
    parts: tuple[str, ...] = PARTS,
    *,
    from_disk: bool = False,
    into: LoadedDenoiser | None = None,
) -> LoadedDenoiser:
    """Load a denoiser, or more parts of one: mapped where the file has the dtype, else converted tensor by tensor.

    Args:
        checkpoint: Where they come from.
        dtype: What to compute in.
        parts: ``und``, ``gen`` or ``io``.
        from_disk: Leave their bytes on disk, for a run that reads each when it is needed.
        into: The one to fill.

    Raises:
        CheckpointError: The file can no longer be read, or stores a tensor in an unknown form.
    """
    module = build_skeleton(Denoiser, {"config": checkpoint.config}) if into is None else into.module
    loaded = LoadedDenoiser(module, checkpoint, dtype) if into is None else into
    names = names_of(checkpoint.config)._asdict()
    for part in parts:
        found = _fill(module.get_submodule(part), checkpoint.tensors, names[part], dtype, from_disk)
        loaded.locations.update({f"{part}.{name}": place for name, place in found.items()})
    return loaded


def _fill(
    part: nn.Module, tensors: Checkpoint, names: Mapping[str, str], dtype: torch.dtype, from_disk: bool
) -> dict[str, TensorLocation]:
    """Fill one part; return what was left on disk."""
    wanted = tensors.without([name for name in tensors if name not in names])
    reader = StoredReader(wanted, {}, target_dtypes(part, lambda _: dtype), from_disk)
    assign_tensors(part, wanted, names, reader)
    return reader.locations
