"""Tiny UMT5 text encoders in every form that Wan's is published in, with weights drawn from a seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import RequestError
from ..load import build_skeleton
from ..text.config import Umt5Config
from ..text.tokenizer import SPIECE_TENSOR, spiece_tokenizer
from ..weights.t5_keys import umt5_original_name
from .umt5_vocabulary import spiece_bytes, tiny_spiece

_CONFIG = Umt5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=80, num_layers=6, num_heads=4)
_TABLES = ("shared.", "relative_attention_bias.")
_FP8 = torch.float8_e4m3fn
_NOISE = 0.1


def tiny_umt5_config() -> Umt5Config:
    """Return the configuration of a tiny text encoder: as wide as the embeds that tiny Wan transformers want."""
    return _CONFIG


def tiny_umt5_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Return the tensors of a tiny text encoder by transformers' name, float32 on the CPU."""
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(**_CONFIG.transformers_arguments())
    skeleton: Any = build_skeleton(UMT5EncoderModel, {"config": config})
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()}
    return {name: _draw(name, shape, generator) for name, shape in sorted(shapes.items())}


def write_tiny_umt5(
    folder: Path | str, kind: str = "comfyui", *, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Write a tiny text encoder with its tokenizer.

    Args:
        folder: Where to write; made if needed.
        kind: ``comfyui`` (one file with the vocabulary inside), ``comfyui_fp8`` (the same, linear weights in fp8 with
            a scale each), ``original`` (Wan's PyTorch file) or ``diffusers`` (the folders of a pipeline).
        seed: Which weights.
        dtype: What to store.

    Returns:
        The file; for ``diffusers`` the folder that holds ``text_encoder`` and ``tokenizer``.

    Raises:
        RequestError: The kind is unknown.
    """
    if kind not in _WRITERS:
        raise RequestError("there is no tiny text encoder of this kind", need=" or ".join(_WRITERS), have=repr(kind))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return _WRITERS[kind](folder, {name: tensor.to(dtype) for name, tensor in tiny_umt5_tensors(seed).items()})


def _write_comfyui(folder: Path, tensors: dict[str, Tensor]) -> Path:
    return _save(folder / "umt5_tiny.safetensors", tensors | {SPIECE_TENSOR: _vocabulary()})


def _write_comfyui_fp8(folder: Path, tensors: dict[str, Tensor]) -> Path:
    stored = {"scaled_fp8": torch.zeros(0, dtype=_FP8), SPIECE_TENSOR: _vocabulary()}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and not any(table in name for table in _TABLES):
            scale = tensor.float().abs().amax() / torch.finfo(_FP8).max
            stored[name] = (tensor.float() / scale).to(_FP8)
            stored[name.removesuffix("weight") + "scale_weight"] = scale
        else:
            stored[name] = tensor
    return _save(folder / "umt5_tiny_fp8_e4m3fn_scaled.safetensors", stored)


def _write_original(folder: Path, tensors: dict[str, Tensor]) -> Path:
    path = folder / "models_t5_umt5-tiny-enc.pth"
    torch.save({umt5_original_name(name): tensor for name, tensor in tensors.items()}, path)
    _write_tokenizer(folder / "google" / "umt5-xxl")
    return path


def _write_diffusers(folder: Path, tensors: dict[str, Tensor]) -> Path:
    from transformers import UMT5Config

    (folder / "text_encoder").mkdir(exist_ok=True)
    _save(folder / "text_encoder" / "model.safetensors", tensors)
    config = UMT5Config(**_CONFIG.transformers_arguments(), architectures=["UMT5EncoderModel"])
    config.to_json_file(str(folder / "text_encoder" / "config.json"))
    _write_tokenizer(folder / "tokenizer")
    return folder


_WRITERS: dict[str, Callable[[Path, dict[str, Tensor]], Path]] = {
    "comfyui": _write_comfyui,
    "comfyui_fp8": _write_comfyui_fp8,
    "original": _write_original,
    "diffusers": _write_diffusers,
}
UMT5_KINDS = tuple(_WRITERS)


def _write_tokenizer(folder: Path) -> None:
    """Write the vocabulary in both forms, as tokenizer folders have it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spiece.model").write_bytes(spiece_bytes(tiny_spiece()))
    backend = spiece_tokenizer(tiny_spiece(), str(folder)).backend
    backend.backend_tokenizer.save(str(folder / "tokenizer.json"))
    settings = '{"tokenizer_class": "T5Tokenizer", "extra_ids": 0, "model_max_length": 512}\n'
    (folder / "tokenizer_config.json").write_text(settings, encoding="utf-8")


def _vocabulary() -> Tensor:
    return torch.tensor(list(spiece_bytes(tiny_spiece())), dtype=torch.uint8)


def _save(path: Path, tensors: dict[str, Tensor]) -> Path:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(path), {"format": "pt"})
    return path


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return seeded values for the tensor that transformers calls ``name``."""
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + _NOISE * noise
    return noise if any(table in name for table in _TABLES) else noise / math.sqrt(shape[-1])
