"""ComfyUI's door to the LowMem nodes.

ComfyUI imports this file by path and reads ``comfy_entrypoint`` and ``WEB_DIRECTORY`` from it.
pytest and other tools import it too, because it makes the repository root a package.
So the nodes, which need a running ComfyUI, are imported only inside one.
"""

import sys
from importlib.util import find_spec


def _is_inside_comfyui() -> bool:
    """Tell whether a ComfyUI server is loading us, rather than a test collector."""
    server = sys.modules.get("server")
    return find_spec("comfy_api") is not None and hasattr(server, "PromptServer")


WEB_DIRECTORY = "./web"

__all__ = ["WEB_DIRECTORY"]

if _is_inside_comfyui():
    from .nodes import comfy_entrypoint as comfy_entrypoint

    __all__ += ["comfy_entrypoint"]
