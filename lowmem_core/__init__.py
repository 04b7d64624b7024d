"""LowMem: image and video diffusion under a byte budget, with the same pixels.

Importing this package is cheap: no model library is loaded until a function needs it.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
