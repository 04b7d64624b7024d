"""A streamed run with two experts that is stopped in any block goes on with the bits of a plain run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from lowmem_core.denoise import Fingerprint, RunStore, SamplerSettings, SavedRun, SavePolicy, denoise, make_stepper
from lowmem_core.families.wan.conditioning import initial_noise
from lowmem_core.families.wan.placement import blocks_of, inventories_of, placed
from lowmem_core.families.wan.sampling import Conditioning, Experts, Guidance, ModelOptions, WanModel
from lowmem_core.place import StreamOptions
from lowmem_core.plan.denoise_plan import Activations, plan_denoise
from lowmem_core.shapes import LatentShape

CPU = torch.device("cpu")
BLOCKS, STEPS, PASSES = 4, 3, 2
SETTINGS = SamplerSettings("unipc", STEPS, 5.0)


class Stop(BaseException):
    """Leaves a run as Ctrl-C does."""


@pytest.fixture(scope="module")
def experts() -> list[SimpleNamespace]:
    """Return two tiny transformers, as a loader would hand them over."""
    loaded = []
    for seed in range(2):
        torch.manual_seed(seed)
        module = WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=16, text_dim=32, freq_dim=64, ffn_dim=64, num_layers=BLOCKS
        )
        loaded.append(SimpleNamespace(module=module.requires_grad_(False).eval(), locations={}))
    return loaded


def run(loaded: list[SimpleNamespace], options: ModelOptions, saving: SavedRun | None = None) -> Tensor:
    """Denoise with both experts; the second takes over in the second step."""
    stepper = make_stepper(SETTINGS)
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randn(1, 8, 32, generator=generator) for _ in range(PASSES)]
    pair = Experts(loaded[0].module, loaded[1].module, 0.95)
    model = WanModel(pair, Conditioning(*texts), Guidance(4.0, 3.0), stepper.timesteps, options)
    assert [model.expert_for(index) is pair.high_noise for index in range(STEPS)] == [True, False, False]
    noise = initial_noise(LatentShape(16, 2, 4, 4), 7)
    return denoise(model, stepper.begin(noise=noise), stepper, saving=saving)


def run_streamed(loaded: list[SimpleNamespace], saving: SavedRun, stop_at: int | None = None) -> Tensor:
    """Stream both experts under a byte limit; stop when the block call of that number begins."""
    inventories = inventories_of(loaded)
    plan = plan_denoise(inventories, Activations(4096), "stream", inventories[0].smallest_bytes + 4096)
    calls = [0]

    def count(*_: object) -> None:
        if calls[0] == stop_at:
            raise Stop
        calls[0] += 1

    handles = [block.register_forward_pre_hook(count) for one in loaded for block in blocks_of(one.module)]
    try:
        with placed(loaded, plan, CPU, StreamOptions(poison=True)) as streamer:
            assert streamer is not None

            def announce(module: nn.Module, following: nn.Module | None) -> None:
                streamer.announce(module, following or module)

            return run(loaded, ModelOptions(on_expert=announce), saving)
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("stop_at", range(0, BLOCKS * PASSES * STEPS, 3))
def test_a_streamed_run_stopped_in_a_block_goes_on_with_plain_bits(
    stop_at: int, experts: list[SimpleNamespace], tmp_path: Path
) -> None:
    """In the first expert, at the swap, and in the second; the weights are back where they were."""
    before: Any = [{name: tensor.data_ptr() for name, tensor in one.module.named_parameters()} for one in experts]
    expected = run(experts, ModelOptions())
    saving = SavedRun(RunStore(tmp_path), Fingerprint.of([], {"seed": 7}, {}), SavePolicy(interval_s=1e9))
    with pytest.raises(Stop):
        run_streamed(experts, saving, stop_at)
    steps_done = stop_at // (BLOCKS * PASSES)
    assert [info.step for info in saving.store.list_runs()] == ([steps_done] if steps_done else [])
    assert torch.equal(run_streamed(experts, saving), expected)
    after: Any = [{name: tensor.data_ptr() for name, tensor in one.module.named_parameters()} for one in experts]
    assert before == after
