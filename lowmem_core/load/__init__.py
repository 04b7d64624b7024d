"""From files to modules: empty skeletons, strict assignment, weights stored in few bits, saved latents."""

from .assign import PlainReader, TensorReader, assign_tensors
from .encodings import Encoding, encodings_of
from .latents import read_latents
from .quantised import QuantisedLinear, quantise_linears
from .skeleton import build_skeleton

__all__ = [
    "Encoding",
    "PlainReader",
    "QuantisedLinear",
    "TensorReader",
    "assign_tensors",
    "build_skeleton",
    "encodings_of",
    "quantise_linears",
    "read_latents",
]
