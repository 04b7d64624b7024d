"""From files to modules: empty skeletons, strict assignment, weights stored in few bits, saved latents."""

from .assign import PlainReader, TensorReader, assign_tensors
from .encodings import Encoding, encodings_of
from .latents import read_latents
from .quantised import QuantisedLinear, quantise_linears
from .skeleton import build_skeleton
from .stored_reader import StoredReader, takes_encoding, target_dtypes

__all__ = [
    "Encoding",
    "PlainReader",
    "QuantisedLinear",
    "StoredReader",
    "TensorReader",
    "assign_tensors",
    "build_skeleton",
    "encodings_of",
    "quantise_linears",
    "read_latents",
    "takes_encoding",
    "target_dtypes",
]
