"""The Wan VAEs, shared by every family: their configuration, loading, and latent statistics."""

from .config import WanVaeConfig, wan_vae_config_of
from .load import load_wan_vae, wan_vae_from_tensors
from .statistics import LatentStatistics, denormalise, normalise

__all__ = [
    "LatentStatistics",
    "WanVaeConfig",
    "denormalise",
    "load_wan_vae",
    "normalise",
    "wan_vae_config_of",
    "wan_vae_from_tensors",
]
