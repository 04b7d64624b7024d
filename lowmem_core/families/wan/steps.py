"""The forward of a Wan transformer in three steps: begin, every block, finish.

Cut like this, several passes can run in step: each block is called for all of them before the next one is. The steps
here make the calls of diffusers' own forward; those of ``lean`` make the same ones on fewer tokens at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .sampling import PassInputs


class Begun(NamedTuple):
    """What is known before the first block.

    Attributes:
        states: Of each pass, ``[B, S, D]``.
        texts: What each pass attends to, ``[B, L, D]``; an image's tokens come first.
        temb: The embedded timestep, as ``finish`` takes it.
        modulation: The timestep, as blocks take it.
        rotary: The positions, as blocks take them.
        video_shape: Shape of the transformer's input.
    """

    states: list[Tensor]
    texts: list[Tensor]
    temb: Any
    modulation: Any
    rotary: Any
    video_shape: torch.Size


class ForwardSteps(Protocol):
    """One way of beginning and finishing."""

    def begin(self, hidden_states: Tensor, timestep: Tensor, passes: Sequence[PassInputs]) -> Begun:
        """Embed latents ``[B, C, F, h, w]``, timesteps ``[B]`` or ``[B, S]``, and what each pass is told."""

    def finish(self, state: Tensor, begun: Begun) -> Tensor:
        """Return the prediction ``[B, C, F, h, w]`` of a pass whose last block gave ``state``."""


def run_steps(
    transformer: nn.Module,
    steps: ForwardSteps,
    inputs: tuple[Tensor, Tensor],
    passes: Sequence[PassInputs],
    poll: Callable[[], None],
) -> list[Tensor]:
    """Run all passes, one block at a time.

    Args:
        transformer: A ``WanTransformer3DModel``; its own pre-hooks have been called.
        steps: How to begin and finish.
        inputs: Latents and timesteps.
        passes: What each pass is told.
        poll: Called before each block of each pass; may raise to stop.
    """
    tree: Any = transformer
    begun = steps.begin(*inputs, passes)
    states = begun.states
    for block in tree.blocks:
        for number, text in enumerate(begun.texts):
            poll()
            states[number] = block(states[number], text, begun.modulation, begun.rotary)
    return [steps.finish(states.pop(0), begun) for _ in passes]


class StockSteps:
    """The calls of diffusers' forward, unchanged.

    Args:
        transformer: A ``WanTransformer3DModel``.
    """

    def __init__(self, transformer: nn.Module) -> None:
        self.tree: Any = transformer

    def begin(self, hidden_states: Tensor, timestep: Tensor, passes: Sequence[PassInputs]) -> Begun:
        """Embed everything; all passes begin with the same tensor, which no block changes."""
        rotary, state = self.tree.rope(hidden_states), embed_patches(self.tree, hidden_states)
        rows = timestep.shape[1] if timestep.ndim == 2 else None
        timestep = timestep.to(hidden_states.device).flatten()
        texts, temb, projection = embed_conditions(self.tree, timestep, rows, passes)
        projection = projection.view(*projection.shape[:-1], 6, -1)
        return Begun([state] * len(passes), texts, temb, projection, rotary, hidden_states.shape)

    def finish(self, state: Tensor, begun: Begun) -> Tensor:
        """Norm, project, and put the patches back in their places."""
        table = self.tree.scale_shift_table.to(begun.temb.device)
        axis = begun.temb.ndim - 1
        table = table.unsqueeze(0) if axis == 2 else table
        shift, scale = (table + begun.temb.unsqueeze(axis)).chunk(2, dim=axis)
        if axis == 2:
            shift, scale = shift.squeeze(2), scale.squeeze(2)
        return put_together(self.tree, project_out(self.tree, state, shift, scale), begun.video_shape)


def embed_patches(tree: Any, hidden_states: Tensor) -> Tensor:
    """Return ``[B, S, D]``, contiguous, for latents ``[B, C, F, h, w]``."""
    patches: Tensor = tree.patch_embedding(hidden_states)
    return patches.flatten(2).transpose(1, 2).contiguous()


def embed_conditions(
    tree: Any, timestep: Tensor, rows: int | None, passes: Sequence[PassInputs]
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Embed timesteps and what each pass is told.

    Args:
        tree: The transformer.
        timestep: ``[B]``, or ``[B * rows]``.
        rows: Timesteps of each sample where there are several.
        passes: What each pass is told.

    Returns:
        The texts of the passes, and of the timesteps, which are those of all passes, the embedding ``[B, D]`` or
        ``[B, rows, D]`` and its projection, six times as wide.
    """
    texts, embedded = [], None
    for text, image in passes:
        temb, projection, text, image = tree.condition_embedder(timestep, text, image, timestep_seq_len=rows)
        embedded = embedded or (temb, projection)
        texts.append(text if image is None else torch.concat([image, text], dim=1))
    assert embedded is not None
    return texts, *embedded


def project_out(tree: Any, state: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return the patches of tokens ``[B, n, D]`` as ``[B, n, values]``."""
    shift, scale = shift.to(state.device), scale.to(state.device)
    normed = (tree.norm_out(state.float()) * (1 + scale) + shift).type_as(state)
    projected: Tensor = tree.proj_out(normed)
    return projected


def put_together(tree: Any, patches: Tensor, video_shape: torch.Size) -> Tensor:
    """Return latents ``[B, C, F, h, w]`` of patches ``[B, S, values]``."""
    batch, _, frames, height, width = video_shape
    along_t, along_h, along_w = tree.config.patch_size
    grid = (frames // along_t, height // along_h, width // along_w)
    latents = patches.reshape(batch, *grid, along_t, along_h, along_w, -1).permute(0, 7, 1, 4, 2, 5, 3, 6)
    return latents.flatten(6, 7).flatten(4, 5).flatten(2, 3)
