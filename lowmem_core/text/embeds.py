"""Embeds in a file: what a prompt, and an image, became, read strictly and written whole or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..errors import CheckpointError, RequestError
from ..load.assign import PLAIN_DTYPES
from ..weights import Checkpoint, TensorInfo
from ..weights.safetensors_write import write_tensors

_PROMPT, _NEGATIVE, _IMAGE = "prompt_embeds", "negative_prompt_embeds", "image_embeds"
_NAMES = (_PROMPT, _NEGATIVE, _IMAGE)
_REMEDY = "Encode the prompt again."


@dataclass(frozen=True, eq=False)
class Embeds:
    """What a model is told, as tensors.

    Attributes:
        prompt_embeds: ``[1, L, width]``, floating point, on the CPU.
        negative_prompt_embeds: Likewise, or None where guidance is off.
        image_embeds: ``[1, T, width]`` of CLIP, ``[2, T, width]`` with a last frame; None for models without it.
    """

    prompt_embeds: Tensor
    negative_prompt_embeds: Tensor | None = None
    image_embeds: Tensor | None = None


def read_embeds(path: Path | str) -> Embeds:
    """Return the embeds in a file.

    Args:
        path: A safetensors file with ``prompt_embeds``, and perhaps ``negative_prompt_embeds`` and ``image_embeds``.

    Returns:
        Tensors in the dtype of the file, independent of it.

    Raises:
        RequestError: The file is missing or damaged, lacks ``prompt_embeds``, or holds something that is no embeds.
    """
    try:
        checkpoint = Checkpoint.open_safetensors(path)
        _check_names(checkpoint)
        found = {name: _read(checkpoint, name) for name in _NAMES if name in checkpoint}
    except CheckpointError as error:
        remedy = error.remedy or _REMEDY
        raise RequestError(error.problem, need=error.need, have=error.have, remedy=remedy) from error
    return Embeds(found[_PROMPT], found.get(_NEGATIVE), found.get(_IMAGE))


def write_embeds(path: Path | str, embeds: Embeds) -> Path:
    """Write embeds, whole or not at all.

    Args:
        path: The safetensors file; its folder is made if needed.
        embeds: On any device.

    Raises:
        WriteError: It cannot be written.
    """
    tensors = {_PROMPT: embeds.prompt_embeds, _NEGATIVE: embeds.negative_prompt_embeds, _IMAGE: embeds.image_embeds}
    path = Path(path)
    write_tensors(path, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    return path


def _check_names(checkpoint: Checkpoint) -> None:
    """Raise unless there is a prompt."""
    if _PROMPT not in checkpoint:
        raise RequestError(
            f"{checkpoint.source} holds no embeds of a prompt",
            need=f"a tensor {_PROMPT!r}, and {_NEGATIVE!r} where guidance is on",
            have=", ".join(sorted(checkpoint)[:5]) or "no tensors",
            remedy=_REMEDY,
        )


def _read(checkpoint: Checkpoint, name: str) -> Tensor:
    """Return tensor ``name`` after checking it."""
    _check_form(checkpoint, name, checkpoint[name])
    tensor = checkpoint.read(name).clone()  # the file may be replaced, and kernels give other bits at odd addresses
    wrong = tensor.numel() - int(tensor.isfinite().sum())
    if wrong:
        raise RequestError(
            f"tensor {name!r} of {checkpoint.source} has values that are not finite",
            need="numbers",
            have=f"{wrong} of {tensor.numel()} are NaN or infinite",
            remedy="Encode the prompt again, in bfloat16 or float32.",
        )
    return tensor


def _check_form(checkpoint: Checkpoint, name: str, info: TensorInfo) -> None:
    """Raise unless tensor ``name`` is floating point and has the dimensions of embeds."""
    batches = (1, 2) if name == _IMAGE else (1,)
    is_right = len(info.shape) == 3 and info.shape[0] in batches and 0 not in info.shape
    if not is_right or info.dtype not in PLAIN_DTYPES:
        raise RequestError(
            f"tensor {name!r} of {checkpoint.source} is no embeds",
            need=f"[{' or '.join(map(str, batches))}, tokens, width] in {', '.join(PLAIN_DTYPES)}",
            have=str(info),
            remedy=_REMEDY,
        )
