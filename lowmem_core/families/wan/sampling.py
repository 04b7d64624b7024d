"""A Wan model as the denoising loop sees it: one or two transformers, guidance, and what they are told.

Which transformer runs, how inputs are joined and in which type they arrive follow diffusers' pipelines bit for bit.
Guidance is decided for each transformer by itself: at a scale of 1 or less there is one pass. diffusers looks at the
first scale for both, so it runs a second pass, or leaves one out, where the two scales disagree about that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ...denoise.stepper import TRAIN_TIMESTEPS
from ...errors import RequestError
from .conditioning import KeptFrame

_CONFIG_OF_KIND = (
    "in_channels",
    "out_channels",
    "patch_size",
    "num_layers",
    "num_attention_heads",
    "attention_head_dim",
    "ffn_dim",
    "text_dim",
    "image_dim",
)


class PassInputs(NamedTuple):
    """What one pass of a transformer is told beside the latents.

    Attributes:
        encoder_hidden_states: ``[1, L, D]``.
        encoder_hidden_states_image: ``[1, T, I]``, ``[2, T, I]`` or None.
    """

    encoder_hidden_states: Tensor
    encoder_hidden_states_image: Tensor | None = None


class PassRunner(Protocol):
    """Runs the passes of a step: one after the other, or in step so that both use a block while it is there."""

    def __call__(
        self,
        transformer: nn.Module,
        hidden_states: Tensor,
        timestep: Tensor,
        passes: Sequence[Any],
        *,
        poll: Callable[[], None],
    ) -> Sequence[Tensor]:
        """Return the prediction of each pass; ``poll`` may raise to stop."""


@dataclass(frozen=True)
class Experts:
    """The transformers of a model.

    Attributes:
        high_noise: The one for the beginning, or the only one.
        low_noise: The one for the end, or None.
        boundary_ratio: The share of noise at which the second one takes over: 0.875 for text, 0.9 for images.
        dtype: What they compute in; None where their weights tell.
    """

    high_noise: nn.Module
    low_noise: nn.Module | None = None
    boundary_ratio: float | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if (self.low_noise is None) != (self.boundary_ratio is None):
            raise RequestError(
                "a boundary belongs to two transformers, and two transformers need one",
                have=f"{1 if self.low_noise is None else 2} transformer(s), boundary {self.boundary_ratio}",
            )
        if self.boundary_ratio is not None and not 0 <= self.boundary_ratio <= 1:
            raise RequestError("there is no such boundary", need="0 to 1", have=str(self.boundary_ratio))
        if self.low_noise is not None:
            _check_same_kind(self.high_noise, self.low_noise)

    def at(self, timestep: Tensor) -> nn.Module:
        """Return the transformer for ``timestep``, one value."""
        if self.low_noise is None or self.boundary_ratio is None or timestep >= self.boundary_ratio * TRAIN_TIMESTEPS:
            return self.high_noise
        return self.low_noise

    @property
    def compute_dtype(self) -> torch.dtype:
        """What the transformers compute in."""
        dtype: torch.dtype = self.dtype or _tree(self.high_noise).dtype
        return dtype


@dataclass(frozen=True)
class Conditioning:
    """What a model is told.

    Attributes:
        prompt_embeds: ``[1, L, D]``.
        negative_prompt_embeds: Likewise; needed where guidance is on.
        image_embeds: ``[1, T, I]`` of CLIP, for Wan 2.1 image models only; ``[2, T, I]`` with a last frame.
        image_condition: ``[1, 4 + z, F, h, w]``, for models that get images beside the latents.
        kept_frame: The first frame, for models that take a timestep per token.
        per_token_timesteps: Whether each token gets its timestep (TI2V), also without a kept frame.
    """

    prompt_embeds: Tensor
    negative_prompt_embeds: Tensor | None = None
    image_embeds: Tensor | None = None
    image_condition: Tensor | None = None
    kept_frame: KeptFrame | None = None
    per_token_timesteps: bool = False

    def __post_init__(self) -> None:
        if self.kept_frame is not None and not self.per_token_timesteps:
            raise RequestError("a first frame can only be kept by a model with a timestep per token (TI2V)")


@dataclass(frozen=True)
class Guidance:
    """How strongly the prompt is followed.

    Attributes:
        scale: For the high-noise transformer, or the only one; 1 or less turns guidance off and saves a pass.
        low_noise_scale: For the low-noise one; None means the same.
    """

    scale: float = 5.0
    low_noise_scale: float | None = None


def one_at_a_time(
    transformer: nn.Module,
    hidden_states: Tensor,
    timestep: Tensor,
    passes: Sequence[Any],
    *,
    poll: Callable[[], None],
) -> list[Tensor]:
    """Run whole passes one after the other: less memory for activations, all weights once per pass."""
    outputs = []
    for inputs in passes:
        poll()
        text, image = inputs.encoder_hidden_states, inputs.encoder_hidden_states_image
        outputs.append(
            transformer(
                hidden_states=hidden_states,
                timestep=timestep,
                encoder_hidden_states=text,
                encoder_hidden_states_image=image,
                return_dict=False,
            )[0]
        )
    return outputs


@dataclass(frozen=True)
class ModelOptions:
    """How a model runs.

    Attributes:
        run_passes: Runs the passes of a step.
        on_expert: Called before each step with the transformer that runs and the one of the next step, or None after
            the last: a streamer can fetch the first block of the next one in time.
        poll: Called before each pass or, where passes run in step, before each block; may raise to stop.
        host_timesteps: Leave timesteps per token on the CPU, for transformers whose forward sorts them there.
    """

    run_passes: PassRunner = one_at_a_time
    on_expert: Callable[[nn.Module, nn.Module | None], None] = lambda module, next_module: None
    poll: Callable[[], None] = lambda: None
    host_timesteps: bool = False


class WanModel:
    """Predicts for the denoising loop.

    Args:
        experts: The transformers.
        conditioning: What they are told; tensors may be on any device.
        guidance: How strongly.
        timesteps: ``[steps]`` of the run, on the CPU.
        options: How to run.

    Raises:
        RequestError: Something that guidance or the model needs is missing, or is given to a model that ignores it.
    """

    def __init__(
        self,
        experts: Experts,
        conditioning: Conditioning,
        guidance: Guidance,
        timesteps: Tensor,
        options: ModelOptions | None = None,
    ) -> None:
        self._experts = experts
        self._conditioning = conditioning
        self._guidance = guidance
        self._timesteps = timesteps
        self._options = options or ModelOptions()
        self._dtype = experts.compute_dtype
        self._passes: dict[torch.device, list[PassInputs]] = {}
        self._check()

    def __call__(self, latents: Tensor, timestep: Tensor, step_index: int) -> Tensor:
        """Return the guided prediction for ``latents`` ``[1, z, F, h, w]`` at one ``timestep``."""
        expert = self.expert_for(step_index)
        following = self.expert_for(step_index + 1) if step_index + 1 < len(self._timesteps) else None
        self._options.on_expert(expert, following)
        scale = self._scale_of(expert)
        passes = self._inputs_on(latents.device)[: 2 if scale > 1 else 1]
        with torch.no_grad():
            hidden_states = self._joined(latents)
            steps = self._timestep_inputs(timestep, latents)
            outputs = self._options.run_passes(expert, hidden_states, steps, passes, poll=self._options.poll)
            if scale <= 1:
                return outputs[0]
            positive, negative = outputs
            return negative + scale * (positive - negative)

    def expert_for(self, step_index: int) -> nn.Module:
        """Return the transformer that runs at a step, counted from 0."""
        return self._experts.at(self._timesteps[step_index])

    def finish(self, latents: Tensor) -> Tensor:
        """Return the latents of the whole run with the kept frame, if any, put back as it was."""
        kept = self._conditioning.kept_frame
        return latents if kept is None else _on(kept, latents.device).applied(latents)

    def _scale_of(self, expert: nn.Module) -> float:
        """Return the guidance scale of a transformer."""
        low = self._guidance.low_noise_scale
        is_low = expert is self._experts.low_noise and expert is not self._experts.high_noise
        return self._guidance.scale if low is None or not is_low else low

    def _inputs_on(self, device: torch.device) -> list[PassInputs]:
        """Return what both passes are told, in the type of the model; moved once."""
        if device not in self._passes:
            given = self._conditioning
            image = None if given.image_embeds is None else given.image_embeds.to(device, self._dtype)
            texts = [given.prompt_embeds, given.negative_prompt_embeds]
            self._passes[device] = [
                PassInputs(text.to(device, self._dtype), image) for text in texts if text is not None
            ]
        return self._passes[device]

    def _joined(self, latents: Tensor) -> Tensor:
        """Return what goes into the patch embedding."""
        given = self._conditioning
        if given.image_condition is not None:
            latents = torch.cat([latents, given.image_condition.to(latents.device)], dim=1)
        elif given.kept_frame is not None:
            latents = _on(given.kept_frame, latents.device).applied(latents)
        return latents.to(self._dtype)

    def _timestep_inputs(self, timestep: Tensor, latents: Tensor) -> Tensor:
        """Return ``[1]``, or ``[1, tokens]`` float32, built on the CPU: 0 for the tokens of a kept frame."""
        if not self._conditioning.per_token_timesteps:
            return timestep.expand(latents.shape[0]).to(latents.device)
        _, side_y, side_x = _tree(self._experts.high_noise).config.patch_size
        frames, height, width = latents.shape[2:]
        tokens = torch.ones(frames, height // side_y, width // side_x)
        if self._conditioning.kept_frame is not None:
            tokens[0] = 0
        values = (tokens * timestep.cpu()).flatten().unsqueeze(0)
        return values if self._options.host_timesteps else values.to(latents.device)

    def _check(self) -> None:
        """Raise unless everything is there that the steps of this run need."""
        given = self._conditioning
        scales = {self._scale_of(self.expert_for(index)) for index in range(len(self._timesteps))}
        if max(scales) > 1 and given.negative_prompt_embeds is None:
            raise RequestError(
                "guidance needs a negative prompt",
                need="negative_prompt_embeds, which may be those of an empty text",
                have=f"guidance {max(scales)}",
                remedy="Give a negative prompt or use guidance 1.",
            )
        config = _tree(self._experts.high_noise).config
        if (config.image_dim is None) != (given.image_embeds is None):
            raise RequestError(
                "image embeds belong to Wan 2.1 image models, which need them",
                need="none" if config.image_dim is None else f"CLIP embeds of width {config.image_dim}",
                have="none" if given.image_embeds is None else str(list(given.image_embeds.shape)),
            )
        beside = 0 if given.image_condition is None else int(given.image_condition.shape[1])
        if config.in_channels != config.out_channels + beside:
            raise RequestError(
                "this model and these conditions do not belong together",
                need=f"{config.in_channels - config.out_channels} channels beside the latents",
                have=f"{beside}",
                remedy="Give an image to image-to-video models, and none to text-to-video models.",
            )


def _on(kept: KeptFrame, device: torch.device) -> KeptFrame:
    """Return a kept frame on a device."""
    return KeptFrame(kept.latents.to(device), kept.mask.to(device))


def _check_same_kind(first: nn.Module, second: nn.Module) -> None:
    """Raise unless two transformers are built alike."""
    one, other = _tree(first).config, _tree(second).config
    wrong = [name for name in _CONFIG_OF_KIND if _plain(one[name]) != _plain(other[name])]
    if wrong:
        raise RequestError(
            "the low-noise transformer is of another kind than the high-noise one",
            need=", ".join(f"{name} {one[name]}" for name in wrong),
            have=", ".join(f"{name} {other[name]}" for name in wrong),
            remedy="Use the two files of one model.",
        )


def _plain(value: Any) -> Any:
    """Return a configuration value in a form that compares: lists and tuples mean the same."""
    return tuple(value) if isinstance(value, list) else value


def _tree(module: nn.Module) -> Any:
    """Return a diffusers model for looking at attributes that ``nn.Module`` does not declare."""
    return module
