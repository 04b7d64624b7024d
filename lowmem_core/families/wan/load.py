"""Load a Wan transformer from any file it is published in; weights stored in few bits stay that small."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CheckpointError
from ...load import Encoding, QuantisedLinear, assign_tensors, build_skeleton, encodings_of, quantise_linears
from ...load.assign import PLAIN_DTYPES
from ...load.encodings import FP8_DTYPES, decoded
from ...load.placeholder import placeholder
from ...weights import Checkpoint, TensorInfo, TensorLocation, wan_diffusers_name, wan_prefix_of
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
    reader = _WanReader(checkpoint, encodings, _target_dtypes(module, dtype), from_disk)
    assign_tensors(module, weights.without(scales), names, reader)
    return LoadedTransformer(module, config, dtype, checkpoint.source, reader.locations)


@dataclass
class _WanReader:
    """Reads tensors in every stored form, or notes where they are.

    Attributes:
        scales: The checkpoint that holds the scales.
        encodings: How tensors are stored that are not plain.
        targets: What each tensor of the module is to be, by our name.
        from_disk: Whether to leave on disk what can be read from there later.
        locations: What was left there, by our name.
    """

    scales: Checkpoint
    encodings: Mapping[str, Encoding]
    targets: Mapping[str, torch.dtype]
    from_disk: bool
    locations: dict[str, TensorLocation] = field(default_factory=dict)

    @property
    def forms(self) -> str:
        """What it can read."""
        return "plain floats, fp8 or packed GGUF types"

    def can_read(self, name: str, info: TensorInfo, wanted: Tensor) -> bool:
        """Return whether the tensor is plain, encoded in a known way, or stored as the module wants it."""
        return info.dtype in PLAIN_DTYPES or name in self.encodings

    def read(self, checkpoint: Checkpoint, names: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors, or placeholders for those that are left on disk."""
        present: dict[str, str] = {}
        for name, ours in names.items():
            location = checkpoint.location(name) if self.from_disk and self._is_direct(name, ours) else None
            if location is None:
                present[name] = ours
                continue
            self.locations[ours] = location
            shape = location.shape if self._is_kept(name, ours) else checkpoint[name].unpacked_shape
            yield ours, placeholder(shape, self.targets[ours])
        for name, tensor in checkpoint.read_many(present):
            yield present[name], self._converted(name, present[name], tensor)

    def _is_kept(self, name: str, ours: str) -> bool:
        """Return whether an encoded tensor stays encoded."""
        encoding = self.encodings.get(name)
        return encoding is not None and self.targets[ours] == encoding.storage_dtype

    def _is_direct(self, name: str, ours: str) -> bool:
        """Return whether the bytes of a tensor need at most a change of dtype."""
        encoding = self.encodings.get(name)
        if encoding is None or self._is_kept(name, ours):
            return True
        return encoding.scale_name is None and encoding.kind in FP8_DTYPES

    def _converted(self, name: str, ours: str, tensor: Tensor) -> Tensor:
        """Return the tensor as the module wants it."""
        encoding, target = self.encodings.get(name), self.targets[ours]
        if encoding is None or self._is_kept(name, ours):
            return tensor.to(target)
        scale = None if encoding.scale_name is None else self.scales.read(encoding.scale_name).float()
        return decoded(tensor, encoding, scale, target)


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
    if not encoding.kind or name == layer or _is_fp32(layer):
        return False
    try:
        found = module.get_submodule(layer)
    except AttributeError:
        return False
    return isinstance(found, nn.Linear) and tuple(found.weight.shape) == encoding.shape


def _is_fp32(name: str) -> bool:
    """Return whether diffusers keeps the tensor or layer ``name`` in float32."""
    from diffusers import WanTransformer3DModel

    return not set(WanTransformer3DModel._keep_in_fp32_modules or ()).isdisjoint(name.split("."))


def _target_dtypes(module: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return what each tensor of a skeleton is to be."""
    targets = {name: torch.float32 if _is_fp32(name) else dtype for name in module.state_dict()}
    for name, layer in module.named_modules():
        if isinstance(layer, QuantisedLinear):
            targets[f"{name}.weight"] = layer.encoding.storage_dtype
            if layer.scale is not None:
                targets[f"{name}.scale"] = torch.float32
    return targets
