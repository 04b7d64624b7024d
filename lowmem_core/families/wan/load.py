"""Load a Wan transformer from any file it is published in; weights stored in few bits stay that small."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import CheckpointError
from ...load import (
    Encoding,
    StoredReader,
    assign_tensors,
    build_skeleton,
    encodings_of,
    quantise_linears,
    takes_encoding,
    target_dtypes,
)
from ...weights import Checkpoint, TensorLocation, wan_diffusers_name, wan_prefix_of
from .config import HEAD_DIM, WanConfig

_DTYPES = {"F64": torch.float32, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SCALE_LEAVES = ("scale_weight", "weight_scale")
_MODULE_FOLDER = "transformer"


@dataclass(frozen=True)
class LoadedTransformer:
    """A transformer on the processor, or described there with its bytes left on disk.

    Attributes:
        module: A ``WanTransformer3DModel`` in eval mode, without gradients.
        config: What it is built like.
        dtype: What it computes in.
        source: The path, for messages.
        locations: Where tensors are that were left on disk, by name; empty if none were.
    """

    module: nn.Module
    config: WanConfig
    dtype: torch.dtype
    source: str
    locations: Mapping[str, TensorLocation] = field(default_factory=dict)


def load_wan_transformer(
    path: Path | str, dtype: torch.dtype | None = None, *, from_disk: bool = False
) -> LoadedTransformer:
    """Load a transformer.

    What diffusers keeps in float32 (the timestep embedding, norms and modulation tables) is kept so here too.

    Args:
        path: A ``.safetensors``, ``.gguf`` or PyTorch file with original or diffusers names, also under a prefix; a
            diffusers model folder; or a pipeline folder with ``transformer`` in it.
        dtype: What to compute in, or None for the dtype of the file (bf16 where the file is quantised).
        from_disk: Leave tensors on disk, for a run that reads each block when it is needed.

    Raises:
        CheckpointError: The file is damaged, incomplete, stored in an unknown way or of another model.
        MissingDependencyError: It is a GGUF file, and ``gguf`` is not installed.
    """
    checkpoint = Checkpoint.open(_model_path(Path(path)))
    prefix = wan_prefix_of(checkpoint)
    if prefix is None:
        raise CheckpointError(
            f"{checkpoint.source} holds no Wan transformer",
            need="tensor 'blocks.0.self_attn.q.weight' or 'blocks.0.attn1.to_q.weight', bare or after a known prefix",
            have=f"{len(checkpoint)} tensors: {', '.join(list(checkpoint)[:3])} ...",
            remedy="Use a file from models/diffusion_models of a Wan 2.1 or 2.2 model.",
        )
    checkpoint = checkpoint.part(prefix)
    encodings, notes = encodings_of(checkpoint)
    weights = checkpoint.without(notes)
    names = {name: _our_name(name.removeprefix(prefix)) for name in weights}
    config = _config_of(weights, names, encodings)
    dtype = dtype or _natural_dtype(weights, encodings)
    module = _skeleton(config)
    scales = {encoding.scale_name for encoding in encodings.values() if encoding.scale_name is not None}
    for name, encoding in encodings.items():
        layer = names[name].removesuffix(".weight")
        if _stays_encoded(module, layer, names[name], encoding):
            shape = None if encoding.scale_name is None else weights[encoding.scale_name].shape
            quantise_linears(module, {layer: (encoding, shape)})
            scales -= {encoding.scale_name or ""}
    targets = target_dtypes(module, lambda name: torch.float32 if _is_fp32(name) else dtype)
    reader = StoredReader(checkpoint, encodings, targets, from_disk)
    assign_tensors(module, weights.without(scales), names, reader)
    return LoadedTransformer(module, config, dtype, checkpoint.source, reader.locations)


def _model_path(path: Path) -> Path:
    """Return the folder of the transformer within a pipeline folder, or the path itself."""
    inner = path / _MODULE_FOLDER
    return inner if not (path / "config.json").is_file() and (inner / "config.json").is_file() else path


def _our_name(name: str) -> str:
    """Return diffusers' name of a tensor, scales included."""
    layer, _, leaf = name.rpartition(".")
    return f"{wan_diffusers_name(layer)}.scale" if leaf in _SCALE_LEAVES else wan_diffusers_name(name)


def _config_of(weights: Checkpoint, names: Mapping[str, str], encodings: Mapping[str, Encoding]) -> WanConfig:
    """Return the configuration, whose head width only a config.json can tell."""
    shapes = {names[name]: info.unpacked_shape for name, info in weights.items()}
    return WanConfig.of_shapes(shapes, weights.source, int(weights.config.get("attention_head_dim", HEAD_DIM)))


def _natural_dtype(weights: Checkpoint, encodings: Mapping[str, Encoding]) -> torch.dtype:
    """Return the dtype that most plain weights of the file have, or bf16 where weights are encoded."""
    if any(encoding.kind for encoding in encodings.values()):
        return torch.bfloat16
    totals: dict[str, int] = {}
    for info in weights.values():
        totals[info.dtype] = totals.get(info.dtype, 0) + (info.nbytes or 0)
    return _DTYPES.get(max(totals, key=lambda name: totals[name]), torch.bfloat16)


def _skeleton(config: WanConfig) -> Any:
    """Return a transformer without weights, whose rotary tables, which no file holds, are computed."""
    from diffusers import WanTransformer3DModel
    from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

    module: Any = build_skeleton(WanTransformer3DModel, config.diffusers_arguments())
    module.rope = WanRotaryPosEmbed(config.attention_head_dim, config.patch_size, module.config.rope_max_seq_len)
    return module


def _stays_encoded(module: Any, layer: str, name: str, encoding: Encoding) -> bool:
    """Return whether tensor ``name`` is the weight of a linear layer that can stay as it is stored."""
    return bool(encoding.kind) and name != layer and not _is_fp32(layer) and takes_encoding(module, layer, encoding)


def _is_fp32(name: str) -> bool:
    """Return whether diffusers keeps the tensor or layer ``name`` in float32."""
    from diffusers import WanTransformer3DModel

    return not set(WanTransformer3DModel._keep_in_fp32_modules or ()).isdisjoint(name.split("."))
