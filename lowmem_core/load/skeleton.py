"""A model without memory: every parameter on the meta device until a checkpoint fills it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def build_skeleton(model_class: Callable[..., M], config: Mapping[str, Any]) -> M:
    """Return ``model_class(**config)`` with all parameters and buffers on the meta device, in eval mode.

    The device is set for this thread only. Patching ``nn.Module`` instead, as accelerate does, would leave
    modules that another thread of the host builds at the same time without weights.

    Args:
        model_class: A class of ``nn.Module``, or a function that builds one.
        config: Its keyword arguments.
    """
    with torch.device("meta"):
        return model_class(**config).eval()
