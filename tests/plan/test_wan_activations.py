"""The closed forms for Wan's activations hold against the real code, simulated."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel

from lowmem_core.families.wan.lean import lean
from lowmem_core.families.wan.passes import run_passes
from lowmem_core.families.wan.sampling import PassInputs
from lowmem_core.memory import SimulatedMeter, fake_module, simulation
from lowmem_core.plan.wan_activations import WanForwardSize, lean_forward_bytes, stock_forward_bytes
from lowmem_core.tiny import tiny_wan_config

TEXT, IMAGE, IMAGE_WIDTH = 512, 257, 1280
LARGE = {"attention_head_dim": 128, "text_dim": 4096, "num_layers": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "tiny t2v": tiny_wan_config("t2v").diffusers_arguments() | {"num_layers": 1},
    "tiny ti2v": tiny_wan_config("ti2v").diffusers_arguments() | {"num_layers": 1},
    "1.3B": LARGE | {"num_attention_heads": 12, "ffn_dim": 8960},
    "A14B": LARGE | {"num_attention_heads": 40, "ffn_dim": 13824},
    "2.1 i2v": LARGE
    | {"num_attention_heads": 40, "ffn_dim": 13824, "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120},
    "TI2V-5B": LARGE | {"num_attention_heads": 24, "ffn_dim": 14336, "in_channels": 48, "out_channels": 48},
}
SIZES = {
    "tiny t2v": (3, 8, 12),
    "tiny ti2v": (3, 16, 24),
    "1.3B": (5, 60, 104),
    "A14B": (3, 60, 104),
    "2.1 i2v": (2, 60, 104),
    "TI2V-5B": (5, 44, 80),
}
SLACK = {"tiny t2v": 1.35, "tiny ti2v": 1.7}


def measured(name: str, dtype: torch.dtype, passes: int, is_lean: bool) -> tuple[int, WanForwardSize]:
    """Return the simulated peak beside weights and inputs, and the size it belongs to."""
    config, (frames, height, width) = CONFIGS[name], SIZES[name]
    channels, out = config.get("in_channels", 16), config.get("out_channels", 16)
    per_token, tokens = out == 48, frames * (height // 2) * (width // 2)
    with simulation():
        module = fake_module(lambda: WanTransformer3DModel(**config), dtype=dtype)
        latents = torch.empty(1, channels, frames, height, width, dtype=dtype, device="cuda")
        image = torch.empty(1, IMAGE, IMAGE_WIDTH, dtype=dtype, device="cuda") if config.get("image_dim") else None
        text = torch.empty(1, TEXT, config["text_dim"], dtype=dtype, device="cuda")
        timestep = torch.empty(1, tokens) if per_token else torch.empty(1)
        timestep = timestep if is_lean and per_token else timestep.cuda()
        meter = SimulatedMeter("cuda")
        with meter.measuring(), torch.no_grad(), lean(module) if is_lean else nullcontext():
            run_passes(module, latents, timestep, [PassInputs(text, image)] * passes, poll=lambda: None)
        assert meter.peak_bytes is not None
    size = WanForwardSize(
        tokens=tokens,
        width=config["num_attention_heads"] * 128,
        heads=config["num_attention_heads"],
        ffn_width=config["ffn_dim"],
        context_tokens=TEXT + (0 if image is None else IMAGE),
        patch_values=out * 4,
        element_bytes=dtype.itemsize,
        per_token_timesteps=per_token,
    )
    return meter.peak_bytes, size


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("is_lean", [True, False], ids=["lean", "stock"])
def test_the_closed_form_is_a_bound_and_a_tight_one(name: str, dtype: torch.dtype, passes: int, is_lean: bool) -> None:
    """Never less than the code takes, and little more."""
    peak, size = measured(name, dtype, passes, is_lean)
    bound = (lean_forward_bytes if is_lean else stock_forward_bytes)(size, passes)
    assert peak <= bound <= SLACK.get(name, 1.22) * peak


def test_a_second_pass_in_step_costs_one_hidden_state() -> None:
    """That, its text, and its prediction."""
    size = WanForwardSize(32760, 5120, 40, 13824, 512, 64, 2)
    more = lean_forward_bytes(size, 2) - lean_forward_bytes(size, 1)
    assert size.state_bytes <= more <= 1.1 * size.state_bytes
