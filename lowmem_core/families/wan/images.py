"""Images for Wan models: fitted to the video, and encoded on the device if there is room, else on the processor."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import RequestError
from ...place import resident
from ...shapes import LatentShape
from ...units import format_bytes
from .conditioning import KeptFrame, image_condition, kept_frame

_log = logging.getLogger("lowmem")
_CPU = torch.device("cpu")
# Peak of the streaming encode in bytes per pixel and byte of an element, simulated at real size, and a tenth more.
_ENCODE_BYTES = {1: 4200, 2: 2150}


class ImageConditions(NamedTuple):
    """What images give a model, on the CPU; one of the two, or neither.

    Attributes:
        image_condition: ``[1, 4 + z, F, h, w]``, for models that get images beside the latents.
        kept_frame: The first frame, for models with a timestep per token (TI2V).
    """

    image_condition: Tensor | None = None
    kept_frame: KeptFrame | None = None


@dataclass(frozen=True)
class EncodePlace:
    """Where images may be encoded.

    Attributes:
        device: The device that computes.
        limit_bytes: What it may be given, or None.
        poll: Called before each latent frame; may raise to stop.
    """

    device: torch.device = _CPU
    limit_bytes: int | None = None
    poll: Callable[[], None] = lambda: None


def fitted(image: Tensor, height: int, width: int) -> Tensor:
    """Return an image cut to the shape of the video around its centre, and scaled.

    Args:
        image: ``[1, H, W, 3]`` or ``[H, W, 3]``, 0..1; alpha and further images are left out.
        height: Pixels of the video.
        width: Pixels of the video.

    Returns:
        ``[1, 3, height, width]`` float32 in -1..1.

    Raises:
        RequestError: It is no picture.
    """
    image = image.unsqueeze(0) if image.ndim == 3 else image
    if image.ndim != 4 or image.shape[-1] < 3 or 0 in image.shape:
        raise RequestError("this is no picture", need="[1, height, width, 3]", have=str(list(image.shape)))
    picture = image[:1, :, :, :3].movedim(-1, 1).float()
    have_height, have_width = picture.shape[-2:]
    if have_width * height > have_height * width:
        cut_height, cut_width = have_height, max(1, round(have_height * width / height))
    else:
        cut_height, cut_width = max(1, round(have_width * height / width)), have_width
    top, left = (have_height - cut_height) // 2, (have_width - cut_width) // 2
    picture = picture[:, :, top : top + cut_height, left : left + cut_width]
    if (cut_height, cut_width) != (height, width):
        picture = F.interpolate(picture, (height, width), mode="bicubic", antialias=True).clamp(0, 1)
    return picture * 2 - 1


def condition_on_images(
    vae: nn.Module, shape: LatentShape, first: Tensor, last: Tensor | None = None, place: EncodePlace | None = None
) -> ImageConditions:
    """Encode the first frame, and the last if there is one.

    Args:
        vae: An ``AutoencoderKLWan`` on the CPU; 48 latent channels mean a TI2V model, which keeps a first frame.
        shape: Of the latents to make.
        first: ``[1, 3, H, W]`` in -1..1.
        last: Likewise.
        place: Where to encode.

    Raises:
        RequestError: A TI2V model is given a last frame, or an image has another size than the video.
    """
    place, tree = place or EncodePlace(), _tree(vae)
    keeps_frame = tree.config.z_dim == 48
    if keeps_frame and last is not None:
        raise RequestError("TI2V models take a first frame only", have="a last frame", remedy="Leave it out.")
    device = place.device if _fits(vae, shape, place) else _CPU
    with resident(vae, device):
        if keeps_frame:
            kept = kept_frame(vae, shape, first)
            return ImageConditions(kept_frame=KeptFrame(kept.latents.to(_CPU), kept.mask.to(_CPU)))
        return ImageConditions(image_condition=image_condition(vae, shape, first, last, place.poll).to(_CPU))


def _fits(vae: nn.Module, shape: LatentShape, place: EncodePlace) -> bool:
    """Return whether the encode fits on the device."""
    if place.limit_bytes is None or place.device.type == "cpu":
        return True
    tree, dtype = _tree(vae), next(vae.parameters()).dtype
    scale, patch = int(tree.config.scale_factor_spatial), int(tree.config.patch_size or 1)
    need = _ENCODE_BYTES[patch] * dtype.itemsize * shape.height * shape.width * scale**2
    need += sum(parameter.nbytes for parameter in vae.parameters())
    if need > place.limit_bytes:
        _log.info(
            "encoding the image on the processor: the device would need %s and may use %s",
            format_bytes(need),
            format_bytes(place.limit_bytes),
        )
    return need <= place.limit_bytes


def _tree(module: nn.Module) -> Any:
    """Return a diffusers model for looking at attributes that ``nn.Module`` does not declare."""
    return module
