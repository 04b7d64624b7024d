"""Load a UMT5 text encoder from any file it is published in; weights stored in few bits stay that small.

The token table, a fifth of the model, is never loaded as a whole: the rows of a prompt are read from the file. The
blocks may stay on disk too, for each is needed once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError, RequestError
from ..load import (
    Encoding,
    StoredReader,
    assign_tensors,
    build_skeleton,
    encodings_of,
    quantise_linears,
    takes_encoding,
    target_dtypes,
)
from ..weights import Checkpoint, TensorLocation
from ..weights.t5_keys import UMT5_MARK, UMT5_ORIGINAL_MARK, umt5_name
from .config import Umt5Config
from .layers import StoredOutput, TokenTable
from .tokenizer import SPIECE_TENSOR, TOKENIZER_FILES, PromptTokenizer, embedded_tokenizer, open_tokenizer

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TABLE = "shared.weight"
_TABLE_TWIN = "encoder.embed_tokens.weight"
_STACK = "encoder."
_OUTPUT = "wo"
_MODEL_FOLDER = "text_encoder"


@dataclass(frozen=True)
class LoadedTextEncoder:
    """A text encoder on the processor, or described there with its bytes left on disk.

    Attributes:
        stack: transformers' ``UMT5Stack`` in eval mode, without gradients and without its token table.
        table: The token table.
        tokenizer: The tokenizer.
        config: What it is built like.
        dtype: What it computes in.
        source: The path, for messages.
        locations: Where tensors of the stack are that were left on disk, by name; empty if none were.
    """

    stack: nn.Module
    table: TokenTable
    tokenizer: PromptTokenizer
    config: Umt5Config
    dtype: torch.dtype
    source: str
    locations: Mapping[str, TensorLocation] = field(default_factory=dict)


def load_text_encoder(
    path: Path | str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    tokenizer: Path | str | None = None,
    from_disk: bool = True,
) -> LoadedTextEncoder:
    """Load a UMT5 encoder.

    With float16, what transformers keeps in float32 (the ``wo`` layers) is kept so here too.

    Args:
        path: A ``.safetensors`` or PyTorch file with the names of transformers or of Wan's original files; a
            ``text_encoder`` folder of diffusers; or a pipeline folder with ``text_encoder`` in it.
        dtype: What to compute in. bfloat16 is what Wan was trained with and what diffusers' examples use.
        tokenizer: As in ``open_tokenizer``; None for the one in the file or beside it.
        from_disk: Leave the blocks on disk until they are needed.

    Raises:
        RequestError: The dtype is not one to compute in.
        CheckpointError: The file is damaged, incomplete, stored in an unknown way or of another model, or there is no
            tokenizer.
    """
    if dtype not in DTYPES:
        raise RequestError("a text encoder cannot compute in this", need=", ".join(map(str, DTYPES)), have=str(dtype))
    checkpoint = Checkpoint.open(model_path(Path(path)))
    _check_model(checkpoint)
    encodings, notes = encodings_of(checkpoint)
    weights = checkpoint.without(notes | {SPIECE_TENSOR})
    names = {name: _our_name(name) for name in weights}
    shapes = {names[name]: info.unpacked_shape for name, info in weights.items()}
    config = Umt5Config.of_shapes(shapes, checkpoint.source, checkpoint.config)
    table = next(name for name, ours in names.items() if ours == _TABLE)
    stack, locations = _load_stack(weights, names, encodings, config, _Wish(dtype, from_disk))
    return LoadedTextEncoder(
        stack=stack,
        table=TokenTable(checkpoint, table, dtype, encodings.get(table)),
        tokenizer=_tokenizer(Path(path), checkpoint, tokenizer),
        config=config,
        dtype=dtype,
        source=checkpoint.source,
        locations=locations,
    )


@dataclass(frozen=True)
class _Wish:
    """What the caller wants: the dtype, and whether to leave tensors on disk."""

    dtype: torch.dtype
    from_disk: bool


def _load_stack(
    weights: Checkpoint,
    names: Mapping[str, str],
    encodings: Mapping[str, Encoding],
    config: Umt5Config,
    wish: _Wish,
) -> tuple[nn.Module, Mapping[str, TensorLocation]]:
    """Return the encoder without its table, and where its tensors are."""
    stack = _skeleton(config)
    tables = {name for name, ours in names.items() if ours == _TABLE}
    scales = {encoding.scale_name for encoding in encodings.values() if encoding.scale_name is not None}
    places = {name: ours.removeprefix(_STACK) for name, ours in names.items() if name not in tables}
    for name, encoding in encodings.items():
        layer = places.get(name, "").removesuffix(".weight")
        if not encoding.kind or not takes_encoding(stack, layer, encoding):
            continue
        scale = encoding.scale_name
        quantise_linears(stack, {layer: (encoding, None if scale is None else weights[scale].shape)})
        place = _wrapped(stack, layer, wish.dtype)
        places[name] = f"{place}.weight"
        if scale is not None:
            places[scale] = f"{place}.scale"
            scales.discard(scale)
    reader = StoredReader(
        weights, encodings, target_dtypes(stack, partial(_dtype_of, dtype=wish.dtype)), wish.from_disk
    )
    assign_tensors(stack, weights.without(scales | tables), places, reader)
    return stack, reader.locations


def model_path(path: Path) -> Path:
    """Return the folder of the encoder within a pipeline folder, or the path itself."""
    inner = path / _MODEL_FOLDER
    return inner if not (path / "config.json").is_file() and (inner / "config.json").is_file() else path


def tokenizer_beside(path: Path) -> Path | None:
    """Return the folder of the tokenizer that was published with the encoder at ``path``, or None."""
    if path.is_dir():
        beside = [path, path / "tokenizer", path.parent / "tokenizer"]
    else:
        beside = [path.parent / "google" / "umt5-xxl"]
    holding = (folder for folder in beside if any((folder / name).is_file() for name in TOKENIZER_FILES))
    return next(holding, None)


def _check_model(checkpoint: Checkpoint) -> None:
    """Raise unless ``checkpoint`` has the first matrix of an encoder."""
    if UMT5_MARK not in checkpoint and UMT5_ORIGINAL_MARK not in checkpoint:
        raise CheckpointError(
            f"{checkpoint.source} holds no UMT5 text encoder",
            need=f"tensor {UMT5_MARK!r} or {UMT5_ORIGINAL_MARK!r}",
            have=f"{len(checkpoint)} tensors: {', '.join(list(checkpoint)[:3])} ...",
            remedy="Use a file from models/text_encoders made for Wan, for example umt5_xxl_fp16.safetensors.",
        )


def _our_name(name: str) -> str:
    """Return transformers' name of a tensor; a table that is stored under its twin's name is still the table."""
    ours = umt5_name(name)
    return _TABLE if ours == _TABLE_TWIN else ours


def _tokenizer(path: Path, checkpoint: Checkpoint, wanted: Path | str | None) -> PromptTokenizer:
    """Return the tokenizer that was asked for, or the one in the file, or the one beside it."""
    if wanted is not None:
        return open_tokenizer(wanted)
    if SPIECE_TENSOR in checkpoint:
        return embedded_tokenizer(checkpoint)
    beside = tokenizer_beside(path)
    if beside is not None:
        return open_tokenizer(beside)
    return embedded_tokenizer(checkpoint)  # which says what to do


def _skeleton(config: Umt5Config) -> Any:
    """Return the encoder without weights and without a token table."""
    from transformers import UMT5Config, UMT5EncoderModel

    whole: Any = build_skeleton(UMT5EncoderModel, {"config": UMT5Config(**config.transformers_arguments())})
    stack = whole.encoder
    stack.embed_tokens = nn.Identity()
    return stack


def _wrapped(stack: nn.Module, layer: str, dtype: torch.dtype) -> str:
    """Wrap ``layer`` if transformers would look at its weight; return the name of the layer that is stored."""
    parent_name, _, leaf = layer.rpartition(".")
    if leaf != _OUTPUT:
        return layer
    parent = stack.get_submodule(parent_name)
    setattr(parent, leaf, StoredOutput(parent.get_submodule(leaf), _dtype_of(layer, dtype)))
    return f"{layer}.stored"


def _dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return what the tensor or layer ``name`` computes in: transformers keeps some in float32 beside float16."""
    from transformers import UMT5EncoderModel

    kept = set(UMT5EncoderModel._keep_in_fp32_modules or ())
    return torch.float32 if dtype == torch.float16 and not kept.isdisjoint(name.split(".")) else dtype
