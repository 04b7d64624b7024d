"""One prediction: both sides of guidance go through each layer while its weights are there.

The two tokens around the latents belong to the tower that understands, at every step, so its layers are needed beside
those of the tower that draws. Rows of both towers are computed by themselves and meet in attention only. The sides
stay two unchanged computations: bits are those of one side after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .attention import attend
from .config import LanceConfig
from .prefix import Prefix
from .rotary import Rotation, image_positions, rotation_of
from .towers import Heads, LatentIo, Tower, latent_positions, rms_norm


class Side(NamedTuple):
    """What one side of guidance looks back on.

    Attributes:
        prefix: Keys and values of its prompt.
        boundary: Turns the tokens around the latents.
        latents: Turns the latents.
    """

    prefix: Prefix
    boundary: Rotation
    latents: Rotation


class ImageBlock(NamedTuple):
    """What all predictions of an image share.

    Attributes:
        boundary: ``[2, D]``: embeds of the tokens around the latents.
        positions: ``[N, D]``: added to the latents' embeds.
    """

    boundary: Tensor
    positions: Tensor


class _States(NamedTuple):
    """Hidden states of one side."""

    boundary: Tensor
    latents: Tensor


class Denoiser(nn.Module):
    """Both towers, as an image needs them.

    Args:
        config: Sizes.
    """

    def __init__(self, config: LanceConfig) -> None:
        super().__init__()
        self._eps = config.norm_eps
        self.und = Tower(config, draws=False)
        self.gen = Tower(config, draws=True)
        self.io = LatentIo(config)

    @property
    def blocks(self) -> list[nn.Module]:
        """What can be streamed, in running order."""
        return [part for pair in self._layers() for part in pair if part is not None]

    def forward(
        self,
        latents: Tensor,
        time: Tensor,
        image: ImageBlock,
        sides: Sequence[Side],
        poll: Callable[[], None] = lambda: None,
    ) -> list[Tensor]:
        """Return the velocity ``[N, 48]`` for each side.

        Args:
            latents: ``[N, 48]`` in the dtype of the model.
            time: One value in 0..1, float32, on the device.
            image: What the latents are placed between, and where.
            sides: What they look back on.
            poll: Called before each part of a layer; may raise to stop.
        """
        entered = self.io(latents, time, image.positions)
        states = [_States(image.boundary, entered) for _ in sides]
        del entered
        for layer, entry in enumerate(self.gen.ins):
            poll()
            around = [
                self.und.ins[layer](one.boundary, side.boundary, torch.float32) for one, side in _each(states, sides)
            ]
            within = [entry(one.latents, side.latents, torch.float32) for one, side in _each(states, sides)]
            poll()
            attended = []
            for side in sides:
                attended.append(_attended(around.pop(0), within.pop(0), side.prefix, layer))
            boundary = [one.boundary for one in states]
            if layer < len(self.und.outs):
                out = self.und.outs[layer]
                boundary = [
                    out(one.boundary, torch.cat([seen[:1], seen[-1:]])) for one, seen in _each(states, attended)
                ]
            for index, near in enumerate(boundary):
                drawn = self.gen.outs[layer](states[index].latents, attended.pop(0)[1:-1])
                states[index] = _States(near, drawn)
        return [self.io.latent_out(rms_norm(one.latents, self.gen.norm, self._eps)) for one in states]

    def _layers(self) -> list[tuple[nn.Module | None, ...]]:
        """Return the parts of each layer in running order."""
        return [
            (
                self.und.ins[layer],
                self.gen.ins[layer],
                self.und.outs[layer] if layer < len(self.und.outs) else None,
                self.gen.outs[layer],
            )
            for layer in range(len(self.gen.ins))
        ]


def image_block(
    boundary: Tensor, height: int, width: int, config: LanceConfig, dtype: torch.dtype, device: torch.device
) -> ImageBlock:
    """Return what all predictions of an image of ``height`` by ``width`` latents share.

    Args:
        boundary: ``[2, D]``: embeds of the tokens before and after the latents.
        height: Rows of latents.
        width: Columns of latents.
        config: Sizes.
        dtype: Of the model.
        device: That computes.
    """
    positions = latent_positions(height, width, config)
    return ImageBlock(boundary.to(device, dtype), positions.to(dtype).to(device))


def side_of(prefix: Prefix, height: int, width: int, config: LanceConfig) -> Side:
    """Return a side of an image of ``height`` by ``width`` latents that follows ``prefix``."""
    like = prefix.keys[0]
    rotation = rotation_of(image_positions(prefix.length, height, width), config, like.dtype, like.device)
    around = Rotation(*(torch.cat([part[:1], part[-1:]]) for part in rotation))
    return Side(prefix, around, Rotation(rotation.cos[1:-1], rotation.sin[1:-1]))


def _attended(around: Heads, within: Heads, prefix: Prefix, layer: int) -> Tensor:
    """Return ``[N + 2, D]``: every token of the image sees the prefix and the whole image."""
    query, key, value = (torch.cat([near[:1], inner, near[1:]]) for near, inner in zip(around, within, strict=True))
    keys = torch.cat([prefix.keys[layer], key])
    values = torch.cat([prefix.values[layer], value])
    return attend(query, keys, values)


def _each(first: Sequence[Any], second: Sequence[Any]) -> zip[tuple[Any, Any]]:
    return zip(first, second, strict=True)
