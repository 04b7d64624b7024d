"""Load a Wan VAE from any file it is published in, or from the tensors a host already holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..load import assign_tensors, build_skeleton
from ..weights import Checkpoint, wan_vae_key_map
from .config import WanVaeConfig
from .statistics import LatentStatistics

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan

_PREFIXES = ("", "first_stage_model.", "vae.")
_ORIGINAL_MARK = "decoder.conv1.weight"
_DIFFUSERS_MARK = "decoder.conv_in.weight"


def load_wan_vae(path: Path | str, dtype: torch.dtype | None = torch.float32) -> AutoencoderKLWan:
    """Load a Wan VAE on the CPU, in eval mode, without gradients.

    Args:
        path: A ``.safetensors`` or PyTorch file with original or diffusers names, also under ``vae.`` or
            ``first_stage_model.``; a diffusers VAE folder; or a pipeline folder with ``vae`` in it.
        dtype: Dtype of the weights, or None to keep that of the file, whose bytes are then only mapped.

    Raises:
        CheckpointError: The file is damaged, incomplete, quantised or of another model.
    """
    path = Path(path)
    if not (path / "config.json").is_file() and (path / "vae" / "config.json").is_file():
        path = path / "vae"
    return _build(Checkpoint.open(path), dtype)


def wan_vae_from_tensors(
    state_dict: Mapping[str, Tensor], dtype: torch.dtype | None = None, source_name: str = "the given VAE"
) -> AutoencoderKLWan:
    """Build a Wan VAE around tensors that are already in memory, for example those of ComfyUI's own VAE.

    Tensors of the wanted dtype are shared, not copied, and stay on their device.

    Args:
        state_dict: Tensors under the names that ``load_wan_vae`` takes.
        dtype: Dtype of the weights, or None to keep each tensor's own.
        source_name: What to call the tensors in an error.

    Raises:
        CheckpointError: The tensors are incomplete, quantised or of another model.
    """
    return _build(Checkpoint.of_tensors(state_dict, source_name), dtype)


def _build(checkpoint: Checkpoint, dtype: torch.dtype | None) -> AutoencoderKLWan:
    """Return the VAE that ``checkpoint`` holds."""
    from diffusers import AutoencoderKLWan

    prefix = _prefix_of(checkpoint)
    shapes = {
        name.removeprefix(prefix): shape for name, shape in checkpoint.shapes().items() if name.startswith(prefix)
    }
    config = WanVaeConfig.of_shapes(shapes, checkpoint.source)
    statistics = LatentStatistics.of_config(checkpoint.config, config.z_dim)
    arguments = config.diffusers_arguments()
    arguments |= {"latents_mean": list(statistics.mean), "latents_std": list(statistics.std)}
    vae: AutoencoderKLWan = build_skeleton(AutoencoderKLWan, arguments)
    is_original = prefix + _ORIGINAL_MARK in checkpoint
    names = wan_vae_key_map(vae) if is_original else {name: name for name in vae.state_dict()}
    part = checkpoint.part(prefix) if prefix else checkpoint
    assign_tensors(vae, part, {prefix + name: ours for name, ours in names.items()}, dtype)
    return vae


def _prefix_of(checkpoint: Checkpoint) -> str:
    """Return what comes before the names of the VAE's tensors."""
    for prefix in _PREFIXES:
        if prefix + _ORIGINAL_MARK in checkpoint or prefix + _DIFFUSERS_MARK in checkpoint:
            return prefix
    raise CheckpointError(
        f"{checkpoint.source} holds no Wan VAE",
        need=f"tensor {_ORIGINAL_MARK!r} or {_DIFFUSERS_MARK!r}, bare or after {' or '.join(_PREFIXES[1:])}",
        have=f"{len(checkpoint)} tensors: {', '.join(list(checkpoint)[:3])} ...",
        remedy="Use a Wan 2.1 or Wan 2.2 VAE file.",
    )
