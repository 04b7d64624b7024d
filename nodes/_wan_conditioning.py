"""ComfyUI's CONDITIONING and LATENT as what a Wan model is told."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..lowmem_core.errors import RequestError
from ..lowmem_core.families.wan.conditioning import KeptFrame
from ..lowmem_core.families.wan.config import WanConfig
from ..lowmem_core.families.wan.sampling import Conditioning
from ..lowmem_core.shapes import LatentShape
from ..lowmem_core.vae import LatentStatistics

_IMAGE, _MASK, _CLIP = "concat_latent_image", "concat_mask", "clip_vision_output"
_UNKNOWN = ("control", "vace_frames", "reference_latents", "time_dim_concat", "area", "mask", "audio_embed")
_CLIP_TOKENS = 257


def latent_shape_of(samples: Tensor) -> LatentShape:
    """Return the shape of one video latent.

    Raises:
        RequestError: It is a batch, or no video latent.
    """
    if samples.ndim != 5 or samples.shape[0] != 1:
        raise RequestError(
            "this node makes one video at a time",
            need="latents [1, channels, frames, height, width]",
            have=str(list(samples.shape)),
            remedy="Use Empty HunyuanVideo Latent, or Wan22ImageToVideoLatent for TI2V, with batch_size 1.",
        )
    return LatentShape(*(int(size) for size in samples.shape[1:]))


def told_of(positive: Any, negative: Any, latent: dict[str, Any], config: WanConfig) -> Conditioning:
    """Return what a model of ``config`` is told.

    Args:
        positive: ComfyUI's conditioning, with what its nodes for Wan images put there.
        negative: Likewise.
        latent: ComfyUI's latent, with the noise mask of a kept first frame.
        config: Of the model.

    Raises:
        RequestError: There is something in it that this model, or this node, does not know.
    """
    prompt, values = _single(positive, "positive")
    negative_prompt, _ = _single(negative, "negative")
    samples = latent["samples"]
    kept = _kept_frame(latent, config)
    return Conditioning(
        prompt_embeds=prompt,
        negative_prompt_embeds=negative_prompt,
        image_embeds=_image_embeds(values, config),
        image_condition=_image_condition(values, samples, config),
        kept_frame=kept,
        per_token_timesteps=kept is not None,
    )


def _single(conditioning: Any, name: str) -> tuple[Tensor, dict[str, Any]]:
    """Return the embeddings and the values of a conditioning with one entry."""
    if len(conditioning) != 1 or conditioning[0][0].shape[0] != 1:
        raise RequestError(f"the {name} conditioning must be one prompt", have=f"{len(conditioning)} entries")
    embeds, values = conditioning[0]
    strange = [key for key in _UNKNOWN if values.get(key) is not None]
    if strange:
        raise RequestError(
            f"the {name} conditioning asks for what this node cannot do",
            need="text, first and last images, CLIP vision",
            have=", ".join(strange),
        )
    return embeds, values


def _image_condition(values: dict[str, Any], samples: Tensor, config: WanConfig) -> Tensor | None:
    """Return mask and normalised latents of the given images, as image-to-video models get them."""
    image, mask = values.get(_IMAGE), values.get(_MASK)
    if not config.condition_channels or image is None:
        return None
    if image.shape[2:] != samples.shape[2:] or mask is None or mask.shape[2:] != image.shape[2:]:
        raise RequestError(
            "the encoded image and the latents have other sizes",
            need=str(list(samples.shape[2:])),
            have=str(list(image.shape[2:])),
            remedy="Take the latent from the node that encoded the image.",
        )
    given = (1.0 - mask.float()).expand(1, 4, *samples.shape[2:])
    return torch.cat([given, LatentStatistics.published(image.shape[1]).normalised(image.float())], dim=1)


def _image_embeds(values: dict[str, Any], config: WanConfig) -> Tensor | None:
    """Return the CLIP embeddings for the models that take them."""
    output = values.get(_CLIP)
    if output is None or config.image_dim is None:
        return None
    states: Tensor = output.penultimate_hidden_states
    return states.reshape(-1, _CLIP_TOKENS, states.shape[-1]) if config.pos_embed_seq_len else states


def _kept_frame(latent: dict[str, Any], config: WanConfig) -> KeptFrame | None:
    """Return the first frame that the noise mask keeps, for TI2V models."""
    mask, samples = latent.get("noise_mask"), latent["samples"]
    if mask is None:
        return None
    mask = mask.float().mean(dim=1, keepdim=True) if mask.ndim == 5 else mask
    if not config.has_timestep_per_token or mask.ndim != 5 or mask.shape[2] != samples.shape[2]:
        raise RequestError(
            "this noise mask cannot be used",
            need="none, or with a TI2V model one that keeps the first frame",
            have=str(list(mask.shape)),
            remedy="Use Wan Image To Video (LowMem) or Wan22ImageToVideoLatent, and no Set Latent Noise Mask.",
        )
    mask = mask.expand(1, 1, *samples.shape[2:])
    if bool((mask[:, :, 0] != 0).any()) or bool((mask[:, :, 1:] != 1).any()):
        raise RequestError("a TI2V model keeps the first frame as a whole, and nothing else", have="another mask")
    first = LatentStatistics.published(samples.shape[1]).normalised(samples[:, :, :1].float())
    return KeptFrame(first, mask)
