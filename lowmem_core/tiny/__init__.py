"""Tiny checkpoints and latents, for the demo, the example workflows and the tests."""

from .latents import write_tiny_latents
from .wan_vae import tiny_wan_vae_tensors, write_tiny_wan_vae

__all__ = ["tiny_wan_vae_tensors", "write_tiny_latents", "write_tiny_wan_vae"]
