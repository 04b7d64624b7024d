"""What weight files hold: names, shapes and dtypes, and the bytes of one tensor when asked."""

from .checkpoint import Checkpoint
from .key_map import wan_vae_key_map
from .tensor_info import TensorInfo, TensorLocation

__all__ = ["Checkpoint", "TensorInfo", "TensorLocation", "wan_vae_key_map"]
