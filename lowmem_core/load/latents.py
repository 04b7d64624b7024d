"""Read saved latents: ComfyUI's ``.latent`` files and plain safetensors."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from ..errors import CheckpointError, RequestError
from ..weights import Checkpoint
from .assign import PLAIN_DTYPES

COMFY_LATENT_KEY = "latent_tensor"
COMFY_VERSION_KEY = "latent_format_version_0"
_PLAIN_KEYS = ("latents", "samples")
_UNVERSIONED_SCALE = 1.0 / 0.18215


def read_latents(path: Path | str) -> Tensor:
    """Return the video latents in ``path``.

    A ``.latent`` file without a version mark is from the time when ComfyUI saved latents scaled, and is
    scaled back as ComfyUI does on loading.

    Args:
        path: A ComfyUI ``.latent`` file, or a ``.safetensors`` file with one tensor, or with one under
            ``latents`` or ``samples``.

    Returns:
        ``[B, C, F, H, W]`` float32 on the CPU.

    Raises:
        RequestError: The file is missing, damaged, ambiguous, or not of video latents.
    """
    path = Path(path)
    try:
        checkpoint = Checkpoint.open_safetensors(path)
        key = _latent_key(checkpoint)
        _check_latent(checkpoint, key)
        latents = checkpoint.read(key).float()
    except CheckpointError as error:
        raise RequestError(error.problem, need=error.need, have=error.have, remedy="Save the latents again.") from error
    if key == COMFY_LATENT_KEY and COMFY_VERSION_KEY not in checkpoint:
        latents = latents * _UNVERSIONED_SCALE
    return latents


def _latent_key(checkpoint: Checkpoint) -> str:
    """Return the name under which ``checkpoint`` keeps its latents."""
    for key in (COMFY_LATENT_KEY, *_PLAIN_KEYS):
        if key in checkpoint:
            return key
    if len(checkpoint) == 1:
        return next(iter(checkpoint))
    raise RequestError(
        f"cannot tell which tensor of {checkpoint.source} holds the latents",
        need=f"one tensor, or one named {COMFY_LATENT_KEY}, {' or '.join(_PLAIN_KEYS)}",
        have=", ".join(sorted(checkpoint)[:5]) or "none",
    )


def _check_latent(checkpoint: Checkpoint, key: str) -> None:
    """Raise RequestError unless tensor ``key`` is a non-empty floating point ``[B, C, F, H, W]``."""
    info = checkpoint[key]
    if len(info.shape) != 5 or 0 in info.shape or info.dtype not in PLAIN_DTYPES:
        raise RequestError(
            f"tensor {key!r} of {checkpoint.source} is not of video latents",
            need=f"[1, channels, frames, height, width] in {', '.join(PLAIN_DTYPES)}",
            have=str(info),
        )
