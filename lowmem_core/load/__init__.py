"""From files to modules: empty skeletons, strict assignment, saved latents."""

from .assign import assign_tensors
from .latents import read_latents
from .skeleton import build_skeleton

__all__ = ["assign_tensors", "build_skeleton", "read_latents"]
