"""The layers of both towers, cut where a weight's work is over: what leads into attention, and what comes after.

A layer of either tower is two modules. Between them stands the attention over all tokens, which has no weights, so a
streamed module can give up its place before the other tower's turn.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import LATENT_CHANNELS, TIME_VALUES, LanceConfig
from .rotary import Rotation


class Heads(NamedTuple):
    """What some tokens ask, and what they answer.

    Attributes:
        query: ``[n, H, d]``.
        key: ``[n, K, d]``, turned.
        value: ``[n, K, d]``.
    """

    query: Tensor
    key: Tensor
    value: Tensor


class AttentionIn(nn.Module):
    """Norm, projections, norms of the heads and rotation of one layer of one tower."""

    def __init__(self, config: LanceConfig) -> None:
        super().__init__()
        self._eps, self._head_width = config.norm_eps, config.head_width
        self.norm = nn.Parameter(torch.empty(config.width))
        self.q = nn.Linear(config.width, config.width)
        self.k = nn.Linear(config.width, config.kv_width)
        self.v = nn.Linear(config.width, config.kv_width)
        self.q_norm = nn.Parameter(torch.empty(config.head_width))
        self.k_norm = nn.Parameter(torch.empty(config.head_width))

    def forward(self, hidden: Tensor, rotation: Rotation, head_dtype: torch.dtype) -> Heads:
        """Return the heads of ``hidden`` ``[n, D]``.

        Args:
            hidden: In the dtype of the model.
            rotation: Of the same tokens.
            head_dtype: In which queries and keys are normed and turned: that of the model where a prompt is read,
                float32 where an image is made. They are rounded once at the end.
        """
        normed = rms_norm(hidden, self.norm, self._eps)
        split = (hidden.shape[0], -1, self._head_width)
        value = self.v(normed).view(split)
        key = self._turned(self.k(normed).view(split), self.k_norm, rotation, head_dtype)
        query = self.q(normed)
        del normed
        return Heads(self._turned(query.view(split), self.q_norm, rotation, head_dtype), key, value)

    def _turned(self, heads: Tensor, weight: Tensor, rotation: Rotation, head_dtype: torch.dtype) -> Tensor:
        return rotation.applied(rms_norm(heads.to(head_dtype), weight, self._eps)).to(heads.dtype)


class LayerOut(nn.Module):
    """Output projection and MLP of one layer of one tower, with both residuals."""

    def __init__(self, config: LanceConfig) -> None:
        super().__init__()
        self._eps = config.norm_eps
        self.o = nn.Linear(config.width, config.width, bias=False)
        self.norm = nn.Parameter(torch.empty(config.width))
        self.gate = nn.Linear(config.width, config.mlp_width, bias=False)
        self.up = nn.Linear(config.width, config.mlp_width, bias=False)
        self.down = nn.Linear(config.mlp_width, config.width, bias=False)

    def forward(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Return the hidden states ``[n, D]`` behind the layer, given those before it and what attention gave."""
        hidden = hidden + self.o(attended)
        normed = rms_norm(hidden, self.norm, self._eps)
        gate = F.silu(self.gate(normed), inplace=True)
        grown: Tensor = self.down(gate.mul_(self.up(normed)))
        return hidden + grown


class Tower(nn.Module):
    """The layers of one tower.

    Args:
        config: Sizes.
        draws: Whether it is the tower that draws: the other needs nothing behind the attention of its last layer.
    """

    def __init__(self, config: LanceConfig, draws: bool) -> None:
        super().__init__()
        self.ins = nn.ModuleList(AttentionIn(config) for _ in range(config.layers))
        self.outs = nn.ModuleList(LayerOut(config) for _ in range(config.layers if draws else config.layers - 1))
        if draws:
            self.norm = nn.Parameter(torch.empty(config.width))

    @property
    def blocks(self) -> list[nn.Module]:
        """What can be streamed, in running order."""
        return [
            part
            for layer, entry in enumerate(self.ins)
            for part in (entry, *([self.outs[layer]] if layer < len(self.outs) else []))
        ]


class LatentIo(nn.Module):
    """Latents to hidden states and back."""

    def __init__(self, config: LanceConfig) -> None:
        super().__init__()
        self.time_in = nn.Linear(TIME_VALUES, config.width)
        self.time_out = nn.Linear(config.width, config.width)
        self.latent_in = nn.Linear(LATENT_CHANNELS, config.width)
        self.latent_out = nn.Linear(config.width, LATENT_CHANNELS)

    def forward(self, latents: Tensor, time: Tensor, positions: Tensor) -> Tensor:
        """Return the hidden states ``[N, D]`` that enter the first layer.

        Args:
            latents: ``[N, 48]`` in the dtype of the model.
            time: One value in 0..1, float32.
            positions: ``[N, D]`` in the dtype of the model.
        """
        values = _time_values(time.expand(latents.shape[0])).to(latents.dtype)
        moment = self.time_out(F.silu(self.time_in(values)))
        entered: Tensor = self.latent_in(latents)
        return entered.add_(moment).add_(positions)


def rms_norm(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``values`` scaled to a mean square of one over the last axis, and by ``weight``.

    The scale is found in float32 and the scaled values are rounded to their own dtype before ``weight`` comes in.
    """
    wide = values.to(torch.float32, copy=True)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.mul_(scale).to(values.dtype)


def latent_positions(height: int, width: int, config: LanceConfig) -> Tensor:
    """Return ``[height * width, D]`` float32: sines and cosines of each latent's row and column.

    The stored table is ignored, as it is in the reference, which computes its rows in float64.
    """
    third = config.width // 3 // 2 * 2
    moment = _sin_cos(torch.zeros(1), third).expand(height * width, -1)
    rows = _sin_cos(torch.arange(height), third).repeat_interleave(width, dim=0)
    cols = _sin_cos(torch.arange(width), config.width - 2 * third).repeat(height, 1)
    return torch.cat([moment, rows, cols], dim=1).to(torch.float32)


def _sin_cos(places: Tensor, width: int) -> Tensor:
    """Return ``[n, width]`` float64."""
    half = width // 2
    speeds = 1.0 / 10000.0 ** (torch.arange(half, dtype=torch.float64) / half)
    angles = places.to(torch.float64).unsqueeze(1) * speeds
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def _time_values(time: Tensor) -> Tensor:
    """Return ``[N, 256]`` float32 of times ``[N]``."""
    half = TIME_VALUES // 2
    steps = torch.arange(half, dtype=torch.float32, device=time.device)
    speeds = torch.exp(-torch.log(torch.tensor(10000.0)).item() * steps / half)
    angles = time.to(torch.float32).unsqueeze(1) * speeds
    return torch.cat([angles.cos(), angles.sin()], dim=1)
