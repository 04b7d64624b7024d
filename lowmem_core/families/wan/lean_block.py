"""One Wan block in the arithmetic of diffusers, with few tensors alive.

The hidden state is changed in place, chunk by chunk; everything but keys and values exists for one chunk of tokens
only. Keys and values of all tokens are made first, from the state as it came in. Then queries are made for a chunk of
tokens, attend to all keys, are projected and added to the state, which no other chunk reads any more. So attention is
as global as ever, and at its worst a block holds three tensors of the state's size: the state, keys and values.

Linear layers, norms and attention are called as modules and by diffusers' own dispatch, so that hooks, adapters,
quantised layers and attention backends work as ever. Writes into the state leave autograd out: whoever wants
gradients gets diffusers' own forward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...chunking import Span, even_spans, query_spans

TEXT_TOKENS = 512
"""What diffusers counts as text where image tokens come before it."""


class Rotary(NamedTuple):
    """Rotations of the positions; diffusers holds each value twice in a row.

    Attributes:
        cos: ``[1, S, 1, d / 2]`` float32.
        sin: Likewise.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, tables: tuple[Tensor, Tensor]) -> Rotary:
        """Take the values that are used from diffusers' tables ``[1, S, 1, d]``."""
        return cls(tables[0][..., 0::2].contiguous(), tables[1][..., 1::2].contiguous())

    def full(self) -> tuple[Tensor, Tensor]:
        """Return diffusers' tables."""
        return self.cos.repeat_interleave(2, -1), self.sin.repeat_interleave(2, -1)

    def write(self, target: Tensor, values: Tensor, span: Span) -> None:
        """Write ``values`` ``[B, n, heads, d]`` of the tokens of ``span``, rotated, into ``target``, of their shape."""
        first, second = values[..., 0::2], values[..., 1::2]
        cos, sin = self.cos[:, span.start : span.stop], self.sin[:, span.start : span.stop]
        store(target[..., 0::2], first * cos - second * sin)
        store(target[..., 1::2], first * sin + second * cos)


class Modulation(NamedTuple):
    """What the timestep does to blocks.

    Attributes:
        projection: ``[B, 6, D]``, or ``[U, 6, D]`` for as many timesteps as there are.
        timestep_of: ``[B, S]`` int64, which of them each token has; None where all tokens of a sample have the same.
    """

    projection: Tensor
    timestep_of: Tensor | None = None

    def full(self) -> Tensor:
        """Return what diffusers' own blocks take: ``[B, 6, D]`` or ``[B, S, 6, D]``."""
        return self.projection if self.timestep_of is None else self.projection[self.timestep_of]

    def of_block(self, table: Tensor) -> BlockModulation:
        """Return the modulation of a block with a ``scale_shift_table`` ``[1, 6, D]``."""
        return BlockModulation(self, table)


class BlockModulation:
    """Shifts, scales and gates of one block, made for the tokens that ask."""

    def __init__(self, modulation: Modulation, table: Tensor) -> None:
        projection, self._timestep_of = modulation
        self._table = table
        self._values = table + projection.float() if self._timestep_of is None else projection

    def rows(self, number: int, span: Span) -> Tensor:
        """Return the vector of a number, 0 to 5, for the tokens of ``span``: ``[B, 1 or n, D]`` float32."""
        if self._timestep_of is None:
            return self._values[:, number : number + 1]
        chosen = self._timestep_of[:, span.start : span.stop]
        return self._table[:, number] + self._values[:, number][chosen].float()


def lean_block(
    block: Any, state: Tensor, text: Tensor, modulation: Modulation, rotary: Rotary, chunk_tokens: int
) -> Tensor:
    """Run a ``WanTransformerBlock`` on ``state`` ``[B, S, D]``, which is changed and returned.

    Args:
        block: The block, its weights readable.
        state: Contiguous.
        text: ``[B, L, D]``.
        modulation: Of the timesteps.
        rotary: Of the positions.
        chunk_tokens: The most tokens of a chunk.
    """
    values = modulation.of_block(block.scale_shift_table)
    _attend_to_itself(block, state, values, rotary, chunk_tokens)
    _attend_to_text(block, state, text, chunk_tokens)
    for span in even_spans(state.shape[1], chunk_tokens):
        forwarded = block.ffn(_modulated(block.norm3, state, values, 3, span))
        _add_gated(state, forwarded.float(), values.rows(5, span), span)
        del forwarded
    return state


def store(target: Tensor, values: Tensor) -> None:
    """Write ``values`` into ``target``, rounding to its type, with no gradient even if a hook turned gradients on."""
    with torch.no_grad():
        target.copy_(values)


def _modulated(norm: Any, state: Tensor, values: BlockModulation, number: int, span: Span) -> Tensor:
    """Return normed tokens, scaled and shifted by the vectors ``number + 1`` and ``number``."""
    normed = norm(state[:, span.start : span.stop].float())
    normed = normed * (1 + values.rows(number + 1, span))
    modulated: Tensor = (normed + values.rows(number, span)).type_as(state)
    return modulated


def _add_gated(state: Tensor, change: Tensor, gate: Tensor, span: Span) -> None:
    tokens = state[:, span.start : span.stop]
    store(tokens, tokens.float() + change * gate)


def _attend_to_itself(block: Any, state: Tensor, values: BlockModulation, rotary: Rotary, chunk_tokens: int) -> None:
    attn, tokens = block.attn1, state.shape[1]
    key = value = None
    for span in even_spans(tokens, chunk_tokens):
        normed = _modulated(block.norm1, state, values, 0, span)
        rows = _heads(attn, attn.norm_k(attn.to_k(normed)))
        key = _room(key, rows, tokens)
        rotary.write(key[:, span.start : span.stop], rows, span)
        rows = _heads(attn, attn.to_v(normed))
        value = _room(value, rows, tokens)
        store(value[:, span.start : span.stop], rows)
        del normed, rows
    assert key is not None
    assert value is not None
    for queries in query_spans(tokens, chunk_tokens):
        query = None
        for span in even_spans(queries.rows, chunk_tokens, queries.start):
            rows = _heads(attn, attn.norm_q(attn.to_q(_modulated(block.norm1, state, values, 0, span))))
            query = _room(query, rows, queries.rows)
            rotary.write(query[:, span.within(queries.start)], rows, span)
            del rows
        attended = _attend(attn, query, key, value)
        del query
        for span in even_spans(queries.rows, chunk_tokens, queries.start):
            change = _projected(attn, attended[:, span.within(queries.start)])
            _add_gated(state, change, values.rows(2, span), span)
            del change
        del attended


def _attend_to_text(block: Any, state: Tensor, text: Tensor, chunk_tokens: int) -> None:
    attn = block.attn2
    contexts = _contexts(attn, text)
    for queries in query_spans(state.shape[1], chunk_tokens):
        query = None
        for span in even_spans(queries.rows, chunk_tokens, queries.start):
            normed = block.norm2(state[:, span.start : span.stop].float()).type_as(state)
            rows = _heads(attn, attn.norm_q(attn.to_q(normed)))
            query = _room(query, rows, queries.rows)
            store(query[:, span.within(queries.start)], rows)
            del normed, rows
        attended = _attend(attn, query, *contexts[0])
        for context in contexts[1:]:
            attended = attended + _attend(attn, query, *context)
        del query
        for span in even_spans(queries.rows, chunk_tokens, queries.start):
            tokens = state[:, span.start : span.stop]
            store(tokens, tokens + _projected(attn, attended[:, span.within(queries.start)]))
        del attended


def _contexts(attn: Any, text: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return keys and values of the text and, where the model takes one, of the image."""
    image = None
    if attn.add_k_proj is not None:
        length = text.shape[1] - TEXT_TOKENS
        image, text = text[:, :length], text[:, length:]
    pairs = [(_heads(attn, attn.norm_k(attn.to_k(text))), _heads(attn, attn.to_v(text)))]
    if image is not None:
        key = _heads(attn, attn.norm_added_k(attn.add_k_proj(image)))
        pairs.append((key, _heads(attn, attn.add_v_proj(image))))
    return pairs


def _attend(attn: Any, query: Any, key: Tensor, value: Tensor) -> Tensor:
    """Attend by the backend that the processor names; return ``[B, n, D]``."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    backend = attn.processor._attention_backend
    attended = dispatch_attention_fn(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, backend=backend)
    rows: Tensor = attended.flatten(2, 3).type_as(query)
    return rows


def _projected(attn: Any, rows: Tensor) -> Tensor:
    projected: Tensor = attn.to_out[1](attn.to_out[0](rows))
    return projected


def _heads(attn: Any, rows: Tensor) -> Tensor:
    """Return ``[B, n, D]`` as ``[B, n, heads, d]``."""
    return rows.view(*rows.shape[:2], attn.heads, -1)


def _room(made: Tensor | None, like: Tensor, tokens: int) -> Tensor:
    """Return ``made``, or room for ``tokens`` tokens of the kind of ``like`` ``[B, n, heads, d]``."""
    if made is not None:
        return made
    return torch.empty(like.shape[0], tokens, *like.shape[2:], dtype=like.dtype, device=like.device)
