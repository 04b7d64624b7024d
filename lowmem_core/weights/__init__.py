"""What weight files hold: names, shapes and dtypes, and the bytes of one tensor when asked."""

from .checkpoint import Checkpoint
from .key_map import wan_vae_key_map
from .tensor_info import Packing, TensorInfo, TensorLocation
from .wan_keys import wan_diffusers_name, wan_original_name, wan_prefix_of

__all__ = [
    "Checkpoint",
    "Packing",
    "TensorInfo",
    "TensorLocation",
    "wan_diffusers_name",
    "wan_original_name",
    "wan_prefix_of",
    "wan_vae_key_map",
]
