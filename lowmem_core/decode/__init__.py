"""From latents to frames: exact tiles in space, a causal stream in time."""

from .decoder_tree import DecoderTree, read_decoder
from .encode import encode_moments
from .latents import latent_shape_of
from .services import DecodeServices
from .stream import decode_frames, decode_samples

__all__ = [
    "DecodeServices",
    "DecoderTree",
    "decode_frames",
    "decode_samples",
    "encode_moments",
    "latent_shape_of",
    "read_decoder",
]
