"""Wan's transformers give the same bits wherever a denoise plan puts them."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from lowmem_core.families.wan.placement import inventories_of, placed
from lowmem_core.place import StreamOptions
from lowmem_core.plan.denoise_plan import Activations, plan_denoise

CPU = torch.device("cpu")
LOG = "limiting resident transformer weights to about"


def loaded(seed: int) -> SimpleNamespace:
    """Return a tiny transformer of six blocks, as a loader would hand it over."""
    torch.manual_seed(seed)
    module = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, text_dim=32, freq_dim=64, ffn_dim=64, num_layers=6
    )
    return SimpleNamespace(module=module.requires_grad_(False).eval(), locations={})


def run(transformer: SimpleNamespace) -> Tensor:
    """Return the output for fixed inputs."""
    generator = torch.Generator().manual_seed(0)
    latents, text = torch.randn(1, 16, 2, 4, 4, generator=generator), torch.randn(1, 512, 32, generator=generator)
    output: Tensor = transformer.module(latents, torch.tensor([500]), text, return_dict=False)[0]
    return output


@pytest.mark.parametrize("mode", ["resident", "stream"])
def test_two_transformers_in_turn_give_plain_bits(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """Both modes give the plain bits; only the mode that limits weights says so, with the real figure."""
    pair = [loaded(0), loaded(1)]
    expected = [run(one) for one in pair]
    inventories = inventories_of(pair)
    limit = inventories[0].smallest_bytes + 4096
    plan = plan_denoise(inventories, Activations(4096), mode, limit if mode == "stream" else None)
    assert (plan.weight_bytes < 0.85 * inventories[0].total_bytes) == (mode == "stream")
    with caplog.at_level(logging.INFO, "lowmem"), placed(pair, plan, CPU, StreamOptions(poison=True)):
        for _ in range(2):
            for one, want in zip(pair, expected, strict=True):
                assert torch.equal(run(one), want)
    assert (LOG in caplog.text) == (mode == "stream")
    assert torch.equal(run(pair[0]), expected[0])
