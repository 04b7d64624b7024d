"""Socket types of ours, and the values that travel through them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from comfy_api.latest import io

from ..lowmem_core.errors import RequestError
from ..lowmem_core.families.wan.models import ModelShelf
from ..lowmem_core.vae import load_wan_vae, wan_vae_from_tensors

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan

BUDGET = io.Custom("LOWMEM_BUDGET")
WAN_VAE = io.Custom("LOWMEM_WAN_VAE")
WAN_MODEL = io.Custom("LOWMEM_WAN_MODEL")

WAN_SHELF = ModelShelf()
"""Keeps transformers loaded between the runs of a workflow."""

DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class WanVaeHandle:
    """A Wan VAE that is not loaded: a path and settings, so keeping it in ComfyUI's cache costs nothing.

    Attributes:
        path: The weight file.
        dtype: A key of ``DTYPES``; "auto" keeps the dtype of the file.
    """

    path: Path
    dtype: str

    def load(self) -> AutoencoderKLWan:
        """Load the module on the CPU, for the run of one node."""
        return load_wan_vae(self.path, DTYPES[self.dtype])


def open_wan_vae(vae: Any) -> AutoencoderKLWan:
    """Return the module behind a VAE socket: our own handle, or the VAE of ComfyUI's Load VAE.

    Raises:
        RequestError: It is the VAE of another model.
    """
    if isinstance(vae, WanVaeHandle):
        return vae.load()
    module = getattr(vae, "first_stage_model", None)
    if type(module).__name__ != "WanVAE":
        raise RequestError(
            "this node decodes with a Wan VAE",
            need="a Wan 2.1 or Wan 2.2 VAE from Load VAE, or Load Wan VAE (LowMem)",
            have=type(vae if module is None else module).__name__,
            remedy="Connect the VAE that belongs to the Wan model, or decode with ComfyUI's VAE Decode.",
        )
    tensors = {name: tensor.detach().to("cpu") for name, tensor in module.state_dict().items()}
    return wan_vae_from_tensors(tensors, dtype=None)
