"""A simulated GPU uses the memory that the same code uses for real."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from torch import nn

from lowmem_core.errors import BudgetExceededError, RequestError
from lowmem_core.memory import (
    CachingAllocator,
    LiveStorageMeter,
    MultiplyAddCounter,
    SimulatedMeter,
    fake_module,
    is_simulated,
    simulation,
)
from lowmem_core.units import MiB


def tiny_vae() -> AutoencoderKLWan:
    """Return a Wan VAE of the real shape at a sixth of the width."""
    return AutoencoderKLWan(base_dim=16, z_dim=16)


def test_a_fake_module_is_frozen_and_on_the_device() -> None:
    """Parameters carry the dtype and device asked for, no data, and the default dtype is restored."""
    with simulation():
        module = fake_module(lambda: nn.Linear(8, 8))
        made = module(torch.ones(2, 8, device="cuda", dtype=torch.bfloat16))
    assert is_simulated(module.weight)
    assert is_simulated(made)
    assert not is_simulated(torch.ones(1))
    assert (module.weight.device.type, module.weight.dtype) == ("cuda", torch.bfloat16)
    assert not module.training
    assert not module.weight.requires_grad
    assert torch.get_default_dtype() == torch.float32


def test_a_fake_module_needs_a_simulation() -> None:
    """Outside, it would allocate real memory."""
    with pytest.raises(RequestError, match="simulation"):
        fake_module(lambda: nn.Linear(1, 1))


def test_storages_are_rounded_as_the_allocator_rounds() -> None:
    """One number takes 512 bytes on the device; what stays on the processor is the host's."""
    meter = SimulatedMeter()
    with simulation(), meter.measuring():
        kept = torch.ones(1, device="cuda"), torch.ones(129, device="cuda"), torch.ones(3)
    assert (meter.live_bytes, meter.host_live_bytes, meter.measured_by) == (1536, 12, "simulated")
    del kept
    assert (meter.live_bytes, meter.host_live_bytes) == (0, 0)


@pytest.mark.parametrize(("dtype", "head"), [(torch.bfloat16, 128), (torch.bfloat16, 384), (torch.float32, 64)])
def test_attention_writes_no_score_matrix(dtype: torch.dtype, head: int) -> None:
    """Attention over 8192 tokens costs its output and a row of statistics, in either fused operator."""
    meter = SimulatedMeter()
    with simulation(), torch.no_grad():
        query = torch.empty(1, 2, 8192, head, device="cuda", dtype=dtype)
        with meter.measuring():
            made = F.scaled_dot_product_attention(query=query, key=query, value=query)
    assert made.shape == query.shape
    assert made.nbytes <= meter.peak_bytes <= made.nbytes + 1 * MiB


def test_masked_and_grouped_attention_runs() -> None:
    """A boolean mask and fewer key heads than query heads are understood."""
    with simulation():
        query, key = torch.empty(1, 4, 8, 32, device="cuda"), torch.empty(1, 2, 16, 32, device="cuda")
        mask = torch.ones(1, 1, 8, 16, dtype=torch.bool, device="cuda")
        made = F.scaled_dot_product_attention(query, key, key, attn_mask=mask, enable_gqa=True)
    assert made.shape == query.shape


def test_attention_is_as_before_afterwards() -> None:
    """No name in torch is rebound, also while a simulation is active."""
    before = F.scaled_dot_product_attention
    with simulation():
        assert F.scaled_dot_product_attention is before
    x = torch.randn(1, 1, 4, 8)
    torch.testing.assert_close(F.scaled_dot_product_attention(x, x, x), torch.softmax(x @ x.mT / 8**0.5, -1) @ x)


def test_the_allocator_model_follows_the_meter() -> None:
    """Storages become blocks and are freed; a capacity predicts running out and leaves the books in order."""
    allocator = CachingAllocator(capacity=64 * MiB)
    meter = SimulatedMeter(allocator=allocator)
    with simulation(), meter.measuring():
        x = torch.empty(30 * MiB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match="predicted"):
            torch.empty(40 * MiB, dtype=torch.uint8, device="cuda")
        assert (allocator.allocated_bytes, meter.live_bytes) == (x.nbytes, x.nbytes)
        del x
    assert (allocator.allocated_bytes, allocator.reserved_bytes, meter.live_bytes) == (0, 30 * MiB, 0)


def test_a_simulated_limit_is_enforced() -> None:
    """The limit works without data, too."""
    meter = SimulatedMeter(limit_bytes=1 * MiB)
    with simulation(), meter.measuring(), pytest.raises(BudgetExceededError, match="cuda"):
        torch.empty(2 * MiB, device="cuda")


def decode_peak(vae: AutoencoderKLWan, latents: torch.Tensor, meter: LiveStorageMeter) -> int:
    """Return the peak of a stock decode, weights not counted."""
    with torch.no_grad(), meter.measuring():
        vae.decode(latents, return_dict=False)
    return meter.peak_bytes


def test_simulated_and_real_decode_peaks_agree() -> None:
    """Under 0.5 % apart: 512 byte rounding, and attention statistics that each backend sizes its own way."""
    shape = (1, 16, 3, 6, 8)
    real = decode_peak(tiny_vae().eval(), torch.zeros(shape), LiveStorageMeter())
    with simulation():
        vae = fake_module(tiny_vae, dtype=torch.float32)
        simulated = decode_peak(vae, torch.zeros(shape, device="cuda"), SimulatedMeter())
    assert simulated == pytest.approx(real, rel=0.005)


def test_the_real_size_decode_is_predicted() -> None:
    """Wan 2.1, 81 frames of 480 x 832 in bfloat16: the stock decode needs 4044 MiB beside its weights."""
    with simulation():
        vae = fake_module(AutoencoderKLWan)
        latents = torch.empty(1, 16, 21, 60, 104, device="cuda", dtype=torch.bfloat16)
        peak = decode_peak(vae, latents, SimulatedMeter())
    assert peak == pytest.approx(4044 * MiB, rel=0.01)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_multiply_adds_follow_from_shapes(context: type) -> None:
    """A convolution, a transposed one, a linear layer and attention are counted by hand."""
    x, tokens = torch.ones(1, 4, 6, 6), torch.ones(1, 2, 10, 8)
    counter = MultiplyAddCounter()
    with context(), counter:
        F.conv2d(x, torch.ones(8, 2, 3, 3), groups=2)
        F.conv_transpose2d(x, torch.ones(4, 5, 2, 2), stride=2)
        F.linear(torch.ones(3, 7), torch.ones(5, 7), torch.ones(5))
        F.scaled_dot_product_attention(tokens, tokens, tokens)
        torch.ones(2, 3, 4) @ torch.ones(2, 4, 5)
    expected = 8 * 16 * 2 * 9 + 4 * 36 * 5 * 4 + 3 * 7 * 5 + 2 * 10 * 10 * 16 + 2 * 3 * 4 * 5
    assert counter.total == sum(counter.by_operator.values()) == expected


def test_simulated_work_equals_real_work() -> None:
    """The same decode does the same multiply-adds with and without data."""
    real, simulated, shape = MultiplyAddCounter(), MultiplyAddCounter(), (1, 16, 2, 4, 6)
    with torch.no_grad(), real:
        tiny_vae().decode(torch.zeros(shape))
    with simulation(), torch.no_grad():
        vae = fake_module(tiny_vae)
        with simulated:
            vae.decode(torch.zeros(shape, device="cuda", dtype=torch.bfloat16))
    assert real.total == simulated.total > 0
