"""Tiny Wan transformers with the structure and the key names of the released ones, and weights drawn from a seed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..errors import RequestError
from ..families.wan.config import WanConfig
from ..load import build_skeleton
from ..weights import wan_original_name

_T2V = WanConfig(
    patch_size=(1, 2, 2),
    num_attention_heads=2,
    attention_head_dim=128,
    in_channels=16,
    out_channels=16,
    text_dim=32,
    freq_dim=64,
    ffn_dim=384,
    num_layers=7,
)
_CONFIGS = {
    "t2v": _T2V,
    "i2v": replace(_T2V, in_channels=36),
    "i2v_image": replace(_T2V, in_channels=36, image_dim=48, added_kv_proj_dim=_T2V.inner_dim),
    "ti2v": replace(_T2V, in_channels=48, out_channels=48),
}
WAN_KINDS = tuple(_CONFIGS)
_HEAD_GAIN = 0.5
_BIAS = 0.02


def tiny_wan_config(kind: str) -> WanConfig:
    """Return the configuration of a tiny transformer.

    Args:
        kind: ``t2v``, ``i2v`` (Wan 2.2), ``i2v_image`` (Wan 2.1, with CLIP embeds) or ``ti2v``.

    Raises:
        RequestError: There is no such kind.
    """
    if kind not in _CONFIGS:
        raise RequestError("there is no tiny Wan model of this kind", need=" or ".join(_CONFIGS), have=repr(kind))
    return _CONFIGS[kind]


def tiny_wan_tensors(kind: str, seed: int = 0) -> dict[str, Tensor]:
    """Return the tensors of a tiny transformer by diffusers' name, float32 on the CPU.

    Raises:
        RequestError: The kind is unknown.
    """
    from diffusers import WanTransformer3DModel

    skeleton = build_skeleton(WanTransformer3DModel, tiny_wan_config(kind).diffusers_arguments())
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}
    return {name: _draw(name, shape, generator) for name, shape in sorted(shapes.items())}


def write_tiny_wan(
    folder: Path | str, kind: str = "t2v", *, seed: int = 0, name: str = "", dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Write a tiny transformer with original key names, about 12 MB in bf16.

    Args:
        folder: Where to write; made if needed.
        kind: As in ``tiny_wan_config``.
        seed: Which weights.
        name: Name of the file; ``wan_<kind>_tiny.safetensors`` if it is empty.
        dtype: What to store; norms and modulation tables are stored as float32.

    Returns:
        The file.

    Raises:
        RequestError: The kind is unknown.
    """
    from safetensors.torch import save_file

    path = Path(folder) / (name or f"wan_{kind}_tiny.safetensors")
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = tiny_wan_tensors(kind, seed)
    stored = {wan_original_name(ours): tensor.to(_stored(ours, dtype)) for ours, tensor in tensors.items()}
    save_file({original: tensor.contiguous() for original, tensor in stored.items()}, str(path))
    return path


def _stored(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which released files keep a tensor."""
    return torch.float32 if "norm" in name or name.endswith("scale_shift_table") else dtype


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return seeded values for the tensor that diffusers calls ``name``."""
    if "norm" in name and name.endswith(".weight"):
        return torch.ones(shape)
    if name.endswith("pos_embed"):
        return _BIAS * torch.randn(shape, generator=generator)
    if name.endswith(".bias"):
        return _BIAS * torch.randn(shape, generator=generator)
    if name.endswith("scale_shift_table"):
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
    gain = _HEAD_GAIN if name.startswith("proj_out") else 1.0
    return gain * torch.randn(shape, generator=generator) / math.sqrt(math.prod(shape[1:]))
