"""ComfyUI nodes of LowMem: thin adapters between sockets and the core."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .load_wan_model import LowmemWanLoader, LowmemWanLoRA
from .load_wan_vae import LowmemWanVAELoader
from .memory_budget import LowmemMemoryBudget
from .wan_decode import LowmemWanStreamingDecode
from .wan_denoise import LowmemWanStreamingDenoise
from .wan_image_to_video import LowmemWanImageToVideo
from .wan_text_encode import LowmemWanTextEncode

NODES: list[type[io.ComfyNode]] = [
    LowmemMemoryBudget,
    LowmemWanVAELoader,
    LowmemWanStreamingDecode,
    LowmemWanLoader,
    LowmemWanLoRA,
    LowmemWanTextEncode,
    LowmemWanImageToVideo,
    LowmemWanStreamingDenoise,
]


class LowmemExtension(ComfyExtension):
    """The pack, as ComfyUI asks for it."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """Return the node classes."""
        return NODES


async def comfy_entrypoint() -> LowmemExtension:
    """Return the extension; ComfyUI calls this once, at start."""
    return LowmemExtension()


__all__ = ["NODES", "LowmemExtension", "comfy_entrypoint"]
