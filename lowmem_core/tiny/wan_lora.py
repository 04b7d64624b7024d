"""Tiny LoRA files for the tiny Wan transformers, in the namings that trainers use."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ..errors import RequestError
from ..weights import wan_original_name
from .wan_transformer import tiny_wan_tensors

LORA_NAMINGS = ("lora_A", "lora_down", "lora_unet", "bare")
_FACTORS = {
    "lora_A": ("diffusion_model.", "lora_A", "lora_B"),
    "lora_down": ("diffusion_model.", "lora_down", "lora_up"),
    "lora_unet": ("lora_unet_", "lora_down", "lora_up"),
    "bare": ("", "lora_A", "lora_B"),
}
_GAIN = 0.3
_DIFFERENCE = 0.02


def write_tiny_wan_lora(
    folder: Path | str,
    kind: str = "t2v",
    naming: str = "lora_A",
    *,
    seed: int = 0,
    rank: int = 4,
    partial: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write a LoRA for a tiny transformer, strong enough to see.

    ``lora_A`` and ``bare`` change the linear layers of blocks and have no alpha; ``lora_unet`` changes the same, with
    an alpha of half the rank; ``lora_down`` looks like a distillation: every linear layer with an alpha and a
    difference of its bias, and whole differences of norms, modulation and the patch embedding.

    Args:
        folder: Where to write; made if needed.
        kind: As in ``tiny_wan_config``.
        naming: One of ``LORA_NAMINGS``.
        seed: Which factors.
        rank: Of the factors.
        partial: Leave out two layers of three.
        dtype: What to store.

    Returns:
        The file, ``wan_<kind>_<naming>_<seed>.safetensors``.

    Raises:
        RequestError: The kind or the naming is unknown.
    """
    from safetensors.torch import save_file

    if naming not in _FACTORS:
        raise RequestError("there is no such naming of LoRA keys", need=" or ".join(LORA_NAMINGS), have=repr(naming))
    path = Path(folder) / f"wan_{kind}_{naming}_{seed}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(_drawn(kind, naming, rank, generator))
    layers = sorted({name.partition("|")[0] for name in tensors})
    kept = set(layers[1::3]) if partial else set(layers)
    stored = {
        name.replace("|", ""): tensor.to(dtype).contiguous()
        for name, tensor in tensors.items()
        if name.partition("|")[0] in kept
    }
    save_file(stored, str(path))
    return path


def _drawn(kind: str, naming: str, rank: int, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a LoRA by key, with a bar between the layer and the ending."""
    prefix, down, up = _FACTORS[naming]
    for name, weight in tiny_wan_tensors(kind).items():
        layer, _, leaf = name.rpartition(".")
        original = wan_original_name(layer if leaf in ("weight", "bias") else name)
        key = prefix + (original.replace(".", "_") if naming == "lora_unet" else original)
        is_linear = leaf == "weight" and weight.ndim == 2
        if is_linear and (layer.startswith("blocks.") or naming == "lora_down"):
            out_features, in_features = weight.shape
            yield f"{key}|.{down}.weight", torch.randn(rank, in_features, generator=generator) / math.sqrt(in_features)
            random = torch.randn(out_features, rank, generator=generator)
            yield f"{key}|.{up}.weight", _GAIN * random / math.sqrt(rank)
            if naming in ("lora_down", "lora_unet"):
                yield f"{key}|.alpha", torch.tensor(rank / 2)
        elif naming == "lora_down" and not name.endswith("pos_embed"):
            ending = ".diff_b" if leaf == "bias" else ".diff"
            yield f"{key}|{ending}", _DIFFERENCE * torch.randn(weight.shape, generator=generator)
