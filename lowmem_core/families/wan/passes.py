"""Both guidance passes in step: each block is called for one, then for the other, and is streamed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...hooks import attached
from .sampling import PassInputs
from .steps import StockSteps, run_steps

LEAN_MARK = "_lowmem_lean"
"""The attribute of lean transformers, whose forward takes ``in_step``."""


class InStep(NamedTuple):
    """What a transformer is called with to run several passes.

    Attributes:
        passes: What each is told.
        poll: Called before each block of each pass; may raise to stop.
    """

    passes: Sequence[PassInputs]
    poll: Callable[[], None]


def run_passes(
    transformer: nn.Module,
    hidden_states: Tensor,
    timestep: Tensor,
    passes: Sequence[Any],
    *,
    poll: Callable[[], None],
) -> list[Tensor]:
    """Run the passes of a step one block at a time, with the bits of one pass after the other.

    The transformer is called once and each block once for every pass, so hooks on them see what they always see.

    Args:
        transformer: A ``WanTransformer3DModel``, lean or not.
        hidden_states: ``[B, C, F, h, w]``; not changed.
        timestep: ``[B]``, or ``[B, S]`` on any device.
        passes: A ``PassInputs`` for each.
        poll: Called before each block of each pass; may raise to stop.

    Returns:
        The prediction ``[B, C, F, h, w]`` of each pass.

    Raises:
        RequestError: Someone else replaced the transformer's forward.
    """
    in_step = InStep(passes, poll)
    if LEAN_MARK in transformer.__dict__:
        return list(transformer(hidden_states, timestep, in_step=in_step))
    with attached(transformer, partial(_forward, transformer)):
        return list(transformer(hidden_states, timestep, in_step=in_step))


def _forward(transformer: nn.Module, hidden_states: Tensor, timestep: Tensor, *, in_step: InStep) -> list[Tensor]:
    return run_steps(transformer, StockSteps(transformer), (hidden_states, timestep), *in_step)
