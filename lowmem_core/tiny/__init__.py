"""Tiny checkpoints and latents, for the demo, the example workflows and the tests."""

from .bundle import write_tiny_bundle
from .latents import write_tiny_latents
from .umt5 import UMT5_KINDS, tiny_umt5_config, tiny_umt5_tensors, write_tiny_umt5
from .wan_lora import LORA_NAMINGS, write_tiny_wan_lora
from .wan_transformer import WAN_KINDS, tiny_wan_config, tiny_wan_tensors, write_tiny_wan
from .wan_vae import tiny_wan_vae_tensors, write_tiny_wan_vae

__all__ = [
    "LORA_NAMINGS",
    "UMT5_KINDS",
    "WAN_KINDS",
    "tiny_umt5_config",
    "tiny_umt5_tensors",
    "tiny_wan_config",
    "tiny_wan_tensors",
    "tiny_wan_vae_tensors",
    "write_tiny_bundle",
    "write_tiny_latents",
    "write_tiny_umt5",
    "write_tiny_wan",
    "write_tiny_wan_lora",
    "write_tiny_wan_vae",
]
