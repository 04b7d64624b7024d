"""Prompts to embeds with the bits of diffusers' ``WanPipeline``, the encoder's blocks streamed through the device.

All prompts go through a block while it is there, one after the other: together they would be another matrix product,
with other bits. What a block is given beside the hidden states (the mask) is asked of transformers itself, by running
its stack without blocks, so that it is right in every version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BudgetError, NotFiniteError, RequestError
from ..load import build_skeleton
from ..load.quantised import largest_dequantised_bytes
from ..place import StreamedModule, StreamOptions, WeightStreamer, inventory_of
from ..plan import StreamPlan, plan_stream
from ..units import GiB, MiB, format_bytes
from .config import Umt5Config
from .load import LoadedTextEncoder
from .tokenizer import PromptTokens

MAX_LENGTH = 512
DEFAULT_LIMIT_BYTES = 2 * GiB
_DECODING_BYTES = 64 * MiB


@dataclass(frozen=True)
class EncodeOptions:
    """How to encode.

    Attributes:
        max_length: Tokens of the embeds; longer prompts are cut, shorter ones filled up with zeros.
        dtype: What the embeds are given in, or None for that of the encoder.
        limit_bytes: The most device bytes, weights and activations; None keeps all weights on the device.
        stream: How to stream. Pinned memory would be packed for a single use, so it is off.
        poll: Called before each block, for each prompt; may raise to stop.
    """

    max_length: int = MAX_LENGTH
    dtype: torch.dtype | None = None
    limit_bytes: int | None = DEFAULT_LIMIT_BYTES
    stream: StreamOptions = field(default_factory=lambda: StreamOptions(pinned=False))
    poll: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class TextPlan:
    """What will be on the device while prompts are encoded.

    Attributes:
        stream: Where the weights live.
        activation_bytes: Bytes beside them.
    """

    stream: StreamPlan
    activation_bytes: int

    @property
    def planned_peak_bytes(self) -> int:
        """Weights and activations together."""
        return self.stream.device_bytes + self.activation_bytes

    def __str__(self) -> str:
        return f"text encoder: {self.stream}; activations {format_bytes(self.activation_bytes)}"


def plan_text(loaded: LoadedTextEncoder, prompts: int, options: EncodeOptions | None = None) -> TextPlan:
    """Plan the encoding of some prompts.

    Args:
        loaded: The encoder.
        prompts: How many.
        options: How.

    Raises:
        BudgetError: Not even two blocks at a time fit.
    """
    options = options or EncodeOptions()
    inventory = inventory_of(loaded.stack, _blocks(loaded.stack))
    activations = _activation_bytes(loaded, prompts, options.max_length)
    if options.limit_bytes is None:
        return TextPlan(plan_stream(inventory), activations)
    smallest = inventory.smallest_bytes + activations
    if smallest > options.limit_bytes:
        raise BudgetError(
            "the text encoder does not fit the budget, even streamed",
            need=f"{format_bytes(smallest)} ({smallest} bytes): {format_bytes(inventory.smallest_bytes)} of weights "
            f"and slots, {format_bytes(activations)} of activations",
            have=format_bytes(options.limit_bytes),
            remedy="Raise the budget to what is needed, use an fp8 file of the encoder, or give embeds as a file.",
            smallest_bytes=smallest,
        )
    return TextPlan(plan_stream(inventory, options.limit_bytes - activations), activations)


def encode_prompts(
    texts: Sequence[str],
    loaded: LoadedTextEncoder,
    device: torch.device | str,
    options: EncodeOptions | None = None,
) -> list[Tensor]:
    """Encode prompts.

    Each prompt's embeds have the bits that ``WanPipeline.encode_prompt`` gives it on the same device, alone, whatever
    else is encoded and wherever the weights are.

    Args:
        texts: The prompts; they are cleaned first.
        loaded: The encoder.
        device: Where to compute.
        options: How.

    Returns:
        For each prompt ``[1, max_length, width]`` on the CPU, zero after its last token.

    Raises:
        RequestError: The length is not positive.
        BudgetError: The encoder does not fit, even streamed.
        NotFiniteError: The encoder gave NaN or infinity.
        CheckpointError: A file can no longer be read, or the tokenizer is not that of the encoder.
    """
    options, device = options or EncodeOptions(), torch.device(device)
    if options.max_length < 2:
        raise RequestError("embeds need room for tokens", need="2 tokens or more", have=str(options.max_length))
    if not texts:
        return []
    plan = plan_text(loaded, len(texts), options)
    tokens = [loaded.tokenizer.tokens(text, options.max_length) for text in texts]
    blocks = _blocks(loaded.stack)
    stack = StreamedModule(loaded.stack, blocks, plan.stream, loaded.locations or None)
    with torch.no_grad(), WeightStreamer([stack], device, options.stream):
        prompts = [_Prompt.of(one, loaded, device) for one in tokens]
        for block in blocks:
            for prompt in prompts:
                options.poll()
                prompt.run(block)
        return [prompt.embeds(loaded, options) for prompt in prompts]


@dataclass
class _Prompt:
    """One prompt on its way through the blocks.

    Attributes:
        hidden: ``[1, L, width]`` on the device.
        length: Tokens that are not padding.
        arguments: What else a block is given.
        keywords: What else a block is given by name.
    """

    hidden: Tensor
    length: int
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    @classmethod
    def of(cls, tokens: PromptTokens, loaded: LoadedTextEncoder, device: torch.device) -> _Prompt:
        """Begin with the tokens' embeddings, looked up beside the device."""
        rows = loaded.table.rows(tokens.ids)
        arguments, keywords = _block_arguments(rows, tokens.mask, loaded.config)
        moved = {name: _moved(value, device) for name, value in keywords.items()}
        return cls(rows.to(device), tokens.length, tuple(_moved(value, device) for value in arguments), moved)

    def run(self, block: nn.Module) -> None:
        """Go through one block."""
        output = block(self.hidden, *self.arguments, **self.keywords)
        self.hidden = output if isinstance(output, Tensor) else output[0]

    def embeds(self, loaded: LoadedTextEncoder, options: EncodeOptions) -> Tensor:
        """Return the embeds, zero where the prompt is over, on the CPU."""
        normed: Tensor = loaded.stack.get_submodule("final_layer_norm")(self.hidden)
        embeds = normed.to(options.dtype or loaded.dtype).to("cpu")
        embeds[:, self.length :] = 0
        if not embeds.isfinite().all():
            raise NotFiniteError(
                f"the text encoder {loaded.source} gave values that are not finite",
                have=str(loaded.dtype),
                remedy="Let it compute in bfloat16 or float32.",
            )
        return embeds


class _Recorder(nn.Module):
    """Stands for all blocks and notes what they would be given."""

    def forward(self, hidden: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        """Return what came in."""
        self.given = (arguments, keywords)
        return hidden


def _block_arguments(rows: Tensor, mask: Tensor, config: Umt5Config) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what transformers gives each block beside the hidden states ``rows`` ``[1, L, width]``."""
    from transformers import UMT5Config, UMT5EncoderModel

    arguments = config.transformers_arguments() | {"num_layers": 0}
    empty: Any = build_skeleton(UMT5EncoderModel, {"config": UMT5Config(**arguments)})
    stack = empty.encoder
    stack.final_layer_norm = nn.Identity()
    recorder = _Recorder()
    stack.block.append(recorder)
    stack(inputs_embeds=rows, attention_mask=mask)
    return recorder.given


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _blocks(stack: nn.Module) -> list[nn.Module]:
    return list(stack.get_submodule("block").children())


def _activation_bytes(loaded: LoadedTextEncoder, prompts: int, length: int) -> int:
    """Return a bound on the device bytes beside the weights.

    Each prompt keeps hidden states and a mask. One block has, for one prompt, at most: the position bias, its sum with
    the mask and its scores in float32 twice; or the gated product, with three tensors beside it; and a weight that is
    decoded for a call, with one portion in float32.
    """
    config, item = loaded.config, loaded.dtype.itemsize
    wide = 4 if any(parameter.dtype == torch.float32 for parameter in loaded.stack.parameters()) else item
    kept = prompts * length * (config.d_model * wide + 4 * length)
    hidden = length * config.d_model * 4
    inner = length * config.num_heads * config.d_kv * wide
    scores = config.num_heads * length * length * (3 * wide + 2 * 4) + 8 * 8 * length * length
    attention = 4 * hidden + 5 * inner + scores
    feed_forward = 4 * hidden + 5 * length * config.d_ff * wide
    unpacked = largest_dequantised_bytes(loaded.stack, wide)
    if unpacked:
        unpacked += _DECODING_BYTES
    return kept + max(attention, feed_forward) + unpacked
