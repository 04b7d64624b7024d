"""A toy model and seeded latents for the loop and for saved runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


class ToyModel:
    """Predicts in a nonlinear way, and may do something else at one step."""

    def __init__(self, at: int = -1, event: Any = None) -> None:
        self.at, self.event, self.calls = at, event, 0

    def __call__(self, latents: Tensor, timestep: Tensor, step_index: int) -> Tensor:
        """Return a prediction that depends on everything."""
        self.calls += 1
        if step_index == self.at and self.event is not None:
            changed: Tensor | None = self.event(latents)
            if changed is not None:
                return changed
        return torch.tanh(1.7 * latents + latents.roll(1, -1)) * (0.5 + float(timestep) / 2000)


@pytest.fixture
def toy_model() -> type[ToyModel]:
    """Return the class of toy models."""
    return ToyModel


@pytest.fixture
def noise() -> Tensor:
    """Return seeded standard normal latents."""
    return torch.randn(1, 4, 3, 4, 4, generator=torch.Generator().manual_seed(0))
