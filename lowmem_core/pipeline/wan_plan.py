"""Plans a Wan denoise from file headers: what its device bytes go to, and where weights wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import RequestError
from ..host import Host
from ..plan.denoise_plan import DEFAULT_WEIGHT_BYTES, STREAM, Activations, DenoisePlan, plan_denoise
from ..plan.wan_activations import LEAN_CHUNK_TOKENS, WanForwardSize, lean_forward_bytes, stock_forward_bytes
from ..units import MiB
from .host_weights import weights_source
from .wan_request import WanRequest

if TYPE_CHECKING:
    from ..families.wan.load import LoadedTransformer
    from ..families.wan.models import ModelShelf

_FLOAT = 4
_DECODING_BYTES = 16 * MiB
_HELD_LATENTS = 6
_STEP_LATENTS = 12


def plan_wan(request: WanRequest, host: Host, shelf: ModelShelf) -> tuple[DenoisePlan, str]:
    """Decide from file headers where weights live and wait; nothing is loaded, and the mode is never changed.

    Returns:
        The plan, and ``host`` or ``disk``: where weights wait that are not on the device.

    Raises:
        RequestError: The parts of the request do not belong together.
        BudgetError: It does not fit.
    """
    from ..families.wan.lora import applied_to_each
    from ..families.wan.placement import inventories_of

    described = shelf.describe(request.files)
    _check(request, described)
    with applied_to_each(described, request.files.loras, reads=False) as transformers:
        inventories, activations = inventories_of(transformers), activations_of(request, transformers)
    limit = request.budget.device_bytes or host.devices.free_bytes()
    weight_limit = None
    if request.budget.device_bytes is None and limit is not None:
        weight_limit = max(DEFAULT_WEIGHT_BYTES, *(inventory.smallest_bytes for inventory in inventories))
    plan = plan_denoise(inventories, activations, request.memory_mode, limit, weight_limit)
    return plan, weights_source(sum(inventory.total_bytes for inventory in inventories), request.budget)


def _check(request: WanRequest, transformers: Sequence[LoadedTransformer]) -> None:
    """Raise unless latents, transformers and VAE are of one model."""
    channels = transformers[0].config.out_channels
    if channels != request.shape.channels:
        raise RequestError(
            "the VAE and the model have other numbers of latent channels",
            need=f"{channels} latent channels, for {transformers[0].source}",
            have=str(request.shape.channels),
            remedy="Use the Wan 2.2 VAE with TI2V models and the Wan 2.1 VAE with all others.",
        )
    width, embeds = transformers[0].config.text_dim, request.conditioning.prompt_embeds
    if embeds.ndim != 3 or embeds.shape[-1] != width:
        raise RequestError(
            "the prompt was embedded for another model",
            need=f"[1, tokens, {width}]: a width of {width}",
            have=str(list(embeds.shape)),
            remedy="Use the UMT5 text encoder that belongs to Wan.",
        )
    if request.latents is not None and tuple(request.latents.shape) != (1, *request.shape):
        raise RequestError(
            "the input latents have another shape than those to make",
            need=str([1, *request.shape]),
            have=str(list(request.latents.shape)),
        )


def activations_of(request: WanRequest, transformers: Sequence[LoadedTransformer]) -> Activations:
    """Return the device bytes beside the weights, for one pass and for two in step.

    Args:
        request: What is to be made.
        transformers: Those that make it, LoRAs applied; only their sizes are looked at.
    """
    has_guidance = max(request.guidance.scale, request.guidance.low_noise_scale or 0) > 1
    held = _held_bytes(request, transformers[0])
    one = max(_forward_bytes(request, loaded, 1) for loaded in transformers)
    two = max(_forward_bytes(request, loaded, 2) for loaded in transformers)
    stepping = held + _STEP_LATENTS * _latent_bytes(request)
    return Activations(max(held + one, stepping), max(held + two, stepping) if has_guidance else None)


def _forward_bytes(request: WanRequest, loaded: LoadedTransformer, passes: int) -> int:
    """Return the bytes of a forward, with what quantised layers and LoRAs need beside."""
    from ..load.lora_branch import widest_branch
    from ..load.quantised import largest_dequantised_bytes

    size = forward_size(request, loaded)
    is_lean = request.memory_mode == STREAM
    nbytes = lean_forward_bytes(size, passes) if is_lean else stock_forward_bytes(size, passes)
    rows = max(min(size.tokens, LEAN_CHUNK_TOKENS) if is_lean else size.tokens, size.context_tokens)
    branches = rows * widest_branch(loaded.module) * size.element_bytes
    decoded = largest_dequantised_bytes(loaded.module, size.element_bytes)
    decoding = min(largest_dequantised_bytes(loaded.module, _FLOAT), _DECODING_BYTES)
    return nbytes + branches + decoded + decoding


def forward_size(request: WanRequest, loaded: LoadedTransformer) -> WanForwardSize:
    """Return what decides the activations of one forward of ``loaded``."""
    config, told = loaded.config, request.conditioning
    _, side_y, side_x = config.patch_size
    texts = [embeds for embeds in (told.prompt_embeds, told.negative_prompt_embeds) if embeds is not None]
    images = 0 if told.image_embeds is None else told.image_embeds.shape[0] * told.image_embeds.shape[1]
    return WanForwardSize(
        tokens=request.shape.frames * (request.shape.height // side_y) * (request.shape.width // side_x),
        width=config.inner_dim,
        heads=config.num_attention_heads,
        ffn_width=config.ffn_dim,
        context_tokens=images + max(embeds.shape[1] for embeds in texts),
        patch_values=config.out_channels * side_y * side_x,
        element_bytes=loaded.dtype.itemsize,
        per_token_timesteps=config.has_timestep_per_token,
    )


def _held_bytes(request: WanRequest, loaded: LoadedTransformer) -> int:
    """Return the bytes held while a forward runs: latents, the history of the sampler, inputs, predictions."""
    told, item = request.conditioning, loaded.dtype.itemsize
    embeds = [told.prompt_embeds, told.negative_prompt_embeds, told.image_embeds]
    values = sum(one.numel() for one in embeds if one is not None)
    condition = 0 if told.image_condition is None else told.image_condition.numel()
    latents = _latent_bytes(request)
    joined = 2 * (latents + condition * _FLOAT)
    return _HELD_LATENTS * latents + joined + values * item


def _latent_bytes(request: WanRequest) -> int:
    channels, frames, height, width = request.shape
    return channels * frames * height * width * _FLOAT
