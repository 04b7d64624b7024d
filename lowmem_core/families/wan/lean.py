"""Wan's transformers with few activations alive, and the same bits.

While ``lean`` lasts, calls of a transformer and its blocks run another forward, beneath all hooks. Timesteps per token
are embedded once each, not once per token. Where gradients are wanted, diffusers' own forward runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...chunking import check_chunk_rows, even_spans
from ...errors import RequestError
from ...hooks import attached, own_forward
from ...memory import is_simulated
from .lean_block import Modulation, Rotary, lean_block, store
from .passes import LEAN_MARK, InStep
from .sampling import PassInputs
from .steps import Begun, embed_conditions, embed_patches, project_out, put_together, run_steps

CHUNK_TOKENS = 1024
TIMESTEP_ROWS = 64
"""Timesteps are embedded this many at a time: products of fewer rows than that may have other bits."""


@contextmanager
def lean(transformer: nn.Module, chunk_tokens: int = CHUNK_TOKENS) -> Iterator[nn.Module]:
    """Let ``transformer`` compute with few tensors alive while the context lasts.

    Timesteps per token may stay on the CPU, where they are sorted; from a device they are fetched.

    Args:
        transformer: A ``WanTransformer3DModel``.
        chunk_tokens: The most tokens of a chunk, 16 or more; attention takes at least 2048 queries at a time.

    Raises:
        RequestError: The transformer is lean already, or something in it changes the arithmetic.
    """
    _check(transformer, chunk_tokens)
    tree: Any = transformer
    with ExitStack() as stack:
        for block in tree.blocks:
            stack.enter_context(attached(block, partial(_forward_block, block, chunk_tokens)))
        stack.enter_context(attached(transformer, partial(_forward, LeanSteps(transformer, chunk_tokens))))
        transformer.__dict__[LEAN_MARK] = chunk_tokens
        stack.callback(transformer.__dict__.pop, LEAN_MARK)
        yield transformer


class LeanSteps:
    """Begins and finishes like ``StockSteps``, with fewer tokens at a time and few timesteps.

    Args:
        transformer: A ``WanTransformer3DModel``.
        chunk_tokens: The most tokens of a chunk.
    """

    def __init__(self, transformer: nn.Module, chunk_tokens: int) -> None:
        self.tree: Any = transformer
        self.chunk_tokens = chunk_tokens

    def begin(self, hidden_states: Tensor, timestep: Tensor, passes: Sequence[PassInputs]) -> Begun:
        """Embed everything; each pass gets a tensor of its own, which blocks change."""
        rotary = Rotary.of(self.tree.rope(hidden_states))
        state = embed_patches(self.tree, hidden_states)
        rows, index, device = None, None, hidden_states.device
        if timestep.ndim == 2:
            timestep, index = distinct(timestep)
            rows, index = len(timestep), index.to(device)
        texts, temb, projection = embed_conditions(self.tree, timestep.to(device), rows, passes)
        if rows is not None:
            temb, projection = temb[0], projection[0]
        states = [state, *(state.clone() for _ in passes[1:])]
        modulation = Modulation(projection.view(len(projection), 6, -1), index)
        return Begun(states, texts, temb, modulation, rotary, hidden_states.shape)

    def finish(self, state: Tensor, begun: Begun) -> Tensor:
        """Norm and project chunk by chunk, and put the patches back in their places."""
        tree, temb, timestep_of = self.tree, begun.temb, begun.modulation.timestep_of
        table = tree.scale_shift_table.to(temb.device)
        patches = None
        for span in even_spans(state.shape[1], self.chunk_tokens):
            tokens = slice(span.start, span.stop)
            rows = temb.unsqueeze(1) if timestep_of is None else temb[timestep_of[:, tokens]]
            shift, scale = table[:, :1] + rows, table[:, 1:] + rows
            chunk = project_out(tree, state[:, tokens], shift, scale)
            if patches is None:
                patches = chunk.new_empty(*state.shape[:2], chunk.shape[-1])
            store(patches[:, tokens], chunk)
        assert patches is not None
        return put_together(tree, patches, begun.video_shape)


def distinct(timestep: Tensor) -> tuple[Tensor, Tensor]:
    """Return the different timesteps and which of them each token has.

    Args:
        timestep: ``[B, S]``, any device; fetched to the CPU.

    Returns:
        Timesteps ``[U]``, repeated up to a multiple of ``TIMESTEP_ROWS``, and int64 ``[B, S]``, both on the CPU. Few
        tokens keep a timestep each.
    """
    if timestep.numel() <= TIMESTEP_ROWS:
        return timestep.flatten(), torch.arange(timestep.numel()).view(timestep.shape)
    if is_simulated(timestep):  # without data nobody can tell; a video has one, or two with a kept frame
        zeros = torch.zeros(timestep.shape, dtype=torch.int64, device="cpu")
        return timestep.flatten()[:TIMESTEP_ROWS].cpu(), zeros
    values, index = torch.unique(timestep.cpu(), return_inverse=True)
    missing = -len(values) % TIMESTEP_ROWS
    return torch.cat([values, values[:1].expand(missing)]), index


def _forward(
    steps: LeanSteps,
    hidden_states: Tensor,
    timestep: Tensor,
    encoder_hidden_states: Any = None,
    encoder_hidden_states_image: Tensor | None = None,
    return_dict: bool = True,
    attention_kwargs: dict[str, Any] | None = None,
    *,
    in_step: InStep | None = None,
) -> Any:
    """Run one pass like diffusers' forward, or the passes of ``in_step`` and return a list."""
    passes, poll = in_step or ([PassInputs(encoder_hidden_states, encoder_hidden_states_image)], lambda: None)
    if torch.is_grad_enabled() or attention_kwargs is not None:
        outputs = _stock_outputs(steps.tree, hidden_states, timestep, passes, attention_kwargs)
    else:
        outputs = run_steps(steps.tree, steps, (hidden_states, timestep), passes, poll)
    if in_step is not None:
        return outputs
    if not return_dict:
        return (outputs[0],)
    from diffusers.models.modeling_outputs import Transformer2DModelOutput

    return Transformer2DModelOutput(sample=outputs[0])


def _stock_outputs(
    tree: Any,
    hidden_states: Tensor,
    timestep: Tensor,
    passes: Sequence[PassInputs],
    attention_kwargs: dict[str, Any] | None,
) -> list[Tensor]:
    """Run passes one after the other by diffusers' forward."""
    timestep, forward = timestep.to(hidden_states.device), own_forward(tree)
    options = {"return_dict": False, "attention_kwargs": attention_kwargs}
    return [forward(hidden_states, timestep, *told, **options)[0] for told in passes]


def _forward_block(
    block: nn.Module,
    chunk_tokens: int,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor | Modulation,
    rotary_emb: tuple[Tensor, Tensor] | Rotary,
) -> Tensor:
    """Run a block: in place for our own forward, by diffusers' forward for any other caller or for gradients."""
    if isinstance(temb, Modulation) and isinstance(rotary_emb, Rotary):
        if not torch.is_grad_enabled():
            return lean_block(block, hidden_states, encoder_hidden_states, temb, rotary_emb, chunk_tokens)
        temb, rotary_emb = temb.full(), rotary_emb.full()
    output: Tensor = own_forward(block)(hidden_states, encoder_hidden_states, temb, rotary_emb)
    return output


def _check(transformer: nn.Module, chunk_tokens: int) -> None:
    """Raise unless the transformer computes what diffusers' forward says."""
    from diffusers import WanTransformer3DModel
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    check_chunk_rows(chunk_tokens)
    if not isinstance(transformer, WanTransformer3DModel):
        raise RequestError(
            "only plain Wan transformers can be lean",
            need="a WanTransformer3DModel",
            have=type(transformer).__name__,
        )
    if LEAN_MARK in transformer.__dict__:
        raise RequestError("the transformer is lean already", remedy="Leave the first context before a second.")
    if getattr(transformer, "is_cache_enabled", False):
        raise RequestError(
            "a cache keeps hidden states that lean transformers change",
            remedy="Call the transformer's disable_cache() first.",
        )
    tree: Any = transformer
    for attn in [attn for block in tree.blocks for attn in (block.attn1, block.attn2)]:
        _check_attention(attn, WanAttnProcessor)


def _check_attention(attn: Any, processor: type) -> None:
    if getattr(attn, "fused_projections", False):
        raise RequestError("projections are fused", remedy="Call the transformer's unfuse_qkv_projections() first.")
    if type(attn.processor) is not processor or getattr(attn.processor, "_parallel_config", None) is not None:
        raise RequestError(
            "attention runs by a processor that lean transformers do not know",
            need=f"{processor.__name__} on one device",
            have=type(attn.processor).__name__,
            remedy="Put diffusers' own processor back.",
        )
