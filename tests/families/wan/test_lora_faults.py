"""LoRAs that do not fit say so, and whatever happens nothing of a LoRA is left on a transformer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lowmem_core.denoise import LoraUse
from lowmem_core.errors import CheckpointError, RequestError
from lowmem_core.families.wan.load import LoadedTransformer, load_wan_transformer
from lowmem_core.families.wan.lora import applied, applied_to_each
from lowmem_core.families.wan.placement import blocks_of, polled
from lowmem_core.load.lora_branch import widest_branch
from lowmem_core.place import inventory_of, streamed
from lowmem_core.plan import plan_stream
from lowmem_core.tiny import tiny_wan_config, write_tiny_wan, write_tiny_wan_lora

CPU = torch.device("cpu")
Q = "diffusion_model.blocks.0.self_attn.q"
Tensors = dict[str, Tensor]


def changed(path: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """Rewrite a file with changed tensors."""
    save_file(change({key: tensor.clone() for key, tensor in load_file(path).items()}), path)
    return path


def run(module: Any) -> Tensor:
    """Return a prediction."""
    config, generator = tiny_wan_config("t2v"), torch.Generator().manual_seed(1)
    latents = torch.randn(1, module.config.in_channels, 3, 8, 8, generator=generator).to(torch.bfloat16)
    text = torch.randn(1, 7, config.text_dim, generator=generator).to(torch.bfloat16)
    with torch.no_grad():
        output: Tensor = module(latents, torch.tensor([500.0]), text, return_dict=False)[0]
    return output


def traces(module: nn.Module) -> dict[str, Any]:
    """Return everything about a module that a LoRA could leave changed."""
    found: dict[str, Any] = {}
    for name, layer in module.named_modules():
        hooks = {key: len(value) for key, value in layer.__dict__.items() if "hook" in key and isinstance(value, dict)}
        tensors = {
            leaf: (id(one), one.data_ptr(), one._version) for leaf, one in layer._parameters.items() if one is not None
        }
        found[name] = (sorted(layer.__dict__), hooks, list(layer._modules), tensors)
    return found


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedTransformer:
    """Return a tiny text-to-video transformer in bf16."""
    return load_wan_transformer(write_tiny_wan(tmp_path))


@pytest.fixture
def distilled(tmp_path: Path) -> Path:
    """Return a LoRA that changes every layer."""
    return write_tiny_wan_lora(tmp_path, naming="lora_down")


def test_nothing_is_left_of_a_lora(loaded: LoadedTransformer, distilled: Path) -> None:
    """Parameters, their storage, submodules, attributes and hooks are the very same, and so is the prediction."""
    before, state, plain = traces(loaded.module), set(loaded.module.state_dict()), run(loaded.module)
    with applied(loaded, [LoraUse(distilled, 1.0), LoraUse(distilled, 0.5)]):
        assert traces(loaded.module) != before
        assert not torch.equal(run(loaded.module), plain)
    assert traces(loaded.module) == before
    assert set(loaded.module.state_dict()) == state
    assert torch.equal(run(loaded.module), plain)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["resident", "streamed"])
def test_nothing_is_left_of_a_lora_after_a_stop(is_streamed: bool, loaded: LoadedTransformer, distilled: Path) -> None:
    """A run that is stopped in a block leaves no more behind than one that ends."""
    before, plain, calls = traces(loaded.module), run(loaded.module), iter(range(3))
    blocks = blocks_of(loaded.module)

    def poll() -> None:
        next(calls)

    def stopped() -> None:
        with applied(loaded, [LoraUse(distilled, 1.0)]), polled(loaded.module, poll):
            inventory = inventory_of(loaded.module, blocks)
            if not is_streamed:
                run(loaded.module)
            with streamed(loaded.module, blocks, plan_stream(inventory, inventory.smallest_bytes), CPU):
                run(loaded.module)

    with pytest.raises(StopIteration):
        stopped()
    assert traces(loaded.module) == before
    assert torch.equal(run(loaded.module), plain)


def test_nothing_is_left_when_a_later_lora_is_refused(
    loaded: LoadedTransformer, distilled: Path, tmp_path: Path
) -> None:
    """All are looked at before the first is applied."""
    before = traces(loaded.module)
    wrong = tmp_path / "wrong.safetensors"
    save_file({"nothing": torch.zeros(1)}, wrong)
    with (
        pytest.raises(RequestError, match="matches nothing"),
        applied(loaded, [LoraUse(distilled, 1), LoraUse(wrong, 1)]),
    ):
        pass
    assert traces(loaded.module) == before


def test_a_strength_of_zero_gives_the_base(loaded: LoadedTransformer, distilled: Path) -> None:
    """Nothing is added, not even zeros."""
    before, plain = traces(loaded.module), run(loaded.module)
    with applied(loaded, [LoraUse(distilled, 0.0)]) as changed_one:
        assert changed_one is loaded
        assert traces(loaded.module) == before
        assert torch.equal(run(loaded.module), plain)


def test_a_lora_of_another_model_is_refused_with_samples(loaded: LoadedTransformer, tmp_path: Path) -> None:
    """The error shows how the file's keys look, and how those of a fitting file would."""
    path = tmp_path / "flux.safetensors"
    save_file(
        {f"transformer.single_transformer_blocks.{i}.attn.to_q.lora_A.weight": torch.zeros(4, 8) for i in range(6)},
        path,
    )
    with (
        pytest.raises(RequestError, match="matches nothing in the model") as caught,
        applied(loaded, [LoraUse(path, 1)]),
    ):
        pass
    assert "blocks.1.cross_attn.q" in caught.value.need
    assert "6 keys: transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight" in caught.value.have
    assert "and 2 more" in caught.value.have


def test_a_lora_of_another_size_is_refused(loaded: LoadedTransformer, distilled: Path) -> None:
    """The error names a key, what it is and what it would have to fit."""
    changed(distilled, lambda tensors: {**tensors, f"{Q}.lora_down.weight": torch.zeros(4, 5120)})
    with pytest.raises(RequestError, match="model of another size") as caught, applied(loaded, [LoraUse(distilled, 1)]):
        pass
    assert f"{Q}.lora_down.weight [4, 5120] for [256, 256]" in caught.value.have


def test_foreign_keys_are_counted_in_a_warning(
    loaded: LoadedTransformer, distilled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What fits is applied, with the bits of a file that holds nothing else."""
    with applied(loaded, [LoraUse(distilled, 1)]):
        expected = run(loaded.module)
    assert not caplog.records
    more = {
        f"diffusion_model.blocks.{number}.cross_attn.k_img.lora_down.weight": torch.zeros(4, 256) for number in range(5)
    }
    total = len(load_file(changed(distilled, lambda tensors: {**tensors, **more})))
    with caplog.at_level(logging.WARNING, "lowmem"), applied(loaded, [LoraUse(distilled, 1)]):
        assert torch.equal(run(loaded.module), expected)
    assert (
        f"{distilled} fits the model in part; left out are 5 of {total} keys: diffusion_model.blocks.0" in caplog.text
    )
    assert "and 1 more" in caplog.text


def test_a_text_to_video_lora_goes_on_an_image_to_video_model(
    distilled: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The patch embedding has more channels there: its weights are left out, with a warning, and its bias is not."""
    loaded = load_wan_transformer(write_tiny_wan(tmp_path, "i2v"))
    plain, bias = run(loaded.module), loaded.module.get_parameter("patch_embedding.bias").clone()
    with caplog.at_level(logging.WARNING, "lowmem"), applied(loaded, [LoraUse(distilled, 1)]):
        assert not torch.equal(run(loaded.module), plain)
        assert not torch.equal(loaded.module.get_parameter("patch_embedding.bias"), bias)
    assert "1 of " in caplog.text
    assert "keys: diffusion_model.patch_embedding.diff" in caplog.text


FAULTS: dict[str, tuple[Callable[[Tensors], Tensors], type[Exception], str]] = {
    "half": (lambda t: {k: v for k, v in t.items() if k != f"{Q}.lora_up.weight"}, CheckpointError, "one half"),
    "dora": (lambda t: {**t, f"{Q}.dora_scale": torch.ones(256, 1)}, RequestError, "is a DoRA"),
    "integers": (
        lambda t: {**t, f"{Q}.lora_up.weight": torch.ones(256, 4, dtype=torch.int8)},
        CheckpointError,
        "cannot read",
    ),
    "alpha": (lambda t: {**t, f"{Q}.alpha": torch.tensor(math.nan)}, CheckpointError, "alpha that is no number"),
    "twice": (lambda t: {**t, "blocks.0.self_attn.q.alpha": torch.tensor(1.0)}, CheckpointError, "twice"),
    "lokr": (lambda t: {f"{Q}.lokr_w1": torch.ones(4, 4)}, RequestError, "matches nothing"),
    "rank": (lambda t: {**t, f"{Q}.lora_up.weight": torch.ones(256, 5)}, RequestError, "another size"),
    "bias": (lambda t: {**t, f"{Q}.diff_b": torch.ones(255)}, RequestError, "another size"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_files_are_refused(fault: str, loaded: LoadedTransformer, distilled: Path) -> None:
    """Damage and kinds of adapters that we cannot apply are known before anything is changed."""
    before, (change, error, text) = traces(loaded.module), FAULTS[fault]
    with pytest.raises(error, match=text), applied(loaded, [LoraUse(changed(distilled, change), 1)]):
        pass
    assert traces(loaded.module) == before


def test_parts_without_a_place_are_left_out(
    loaded: LoadedTransformer, distilled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A bias for a norm that has none, factors for a norm, and an alpha alone change nothing but the log."""
    norm = "diffusion_model.blocks.0.self_attn.norm_q"
    factors = {f"{norm}.lora_down.weight": torch.ones(4, 1), f"{norm}.lora_up.weight": torch.ones(256, 4)}
    more = {f"{norm}.diff_b": torch.ones(256), **factors}
    alone = {f"{Q}.lora_down.weight", f"{Q}.lora_up.weight"}
    changed(distilled, lambda tensors: {key: one for key, one in {**tensors, **more}.items() if key not in alone})
    with caplog.at_level(logging.WARNING, "lowmem"), applied(loaded, [LoraUse(distilled, 1)]):
        run(loaded.module)
    assert "left out are 4 of " in caplog.text


@pytest.mark.parametrize("strength", [math.nan, math.inf])
def test_a_strength_is_a_number(strength: float, loaded: LoadedTransformer, distilled: Path) -> None:
    """Anything else would give NaN frames, hours later."""
    with pytest.raises(RequestError, match="has no strength"), applied(loaded, [LoraUse(distilled, strength)]):
        pass


def test_one_application_at_a_time(loaded: LoadedTransformer, distilled: Path) -> None:
    """A second one is refused, and leaves the first as it is."""
    uses = [LoraUse(distilled, 1.0)]
    with applied(loaded, uses):
        expected = run(loaded.module)
        with pytest.raises(RequestError, match="has LoRAs on it already"), applied(loaded, uses):
            pass
        assert torch.equal(run(loaded.module), expected)
    with applied(loaded, uses):
        assert torch.equal(run(loaded.module), expected)


def test_a_streamed_module_takes_no_lora(loaded: LoadedTransformer, distilled: Path) -> None:
    """The streamer has counted its tensors: LoRAs go on before."""
    blocks = blocks_of(loaded.module)
    inventory = inventory_of(loaded.module, blocks)
    plan = plan_stream(inventory, inventory.smallest_bytes)
    attempt = applied(loaded, [LoraUse(distilled, 1.0)])
    with streamed(loaded.module, blocks, plan, CPU), pytest.raises(RequestError, match="is being streamed"), attempt:
        pass


def test_each_transformer_gets_its_own_loras(tmp_path: Path) -> None:
    """The number of the transformer decides, and the others stay as they are."""
    pair = [load_wan_transformer(write_tiny_wan(tmp_path, seed=seed, name=f"{seed}.safetensors")) for seed in range(2)]
    lora = write_tiny_wan_lora(tmp_path)
    plain = [run(one.module) for one in pair]
    with applied(pair[1], [LoraUse(lora, 0.5)]):
        expected = run(pair[1].module)
    with applied_to_each(pair, [LoraUse(lora, 0.5, 1)]) as both:
        assert torch.equal(run(both[0].module), plain[0])
        assert torch.equal(run(both[1].module), expected)
    assert torch.equal(run(pair[1].module), plain[1])
    with pytest.raises(RequestError, match="no transformer for"), applied_to_each(pair, [LoraUse(lora, 0.5, 2)]):
        pass


@pytest.mark.parametrize("from_disk", [False, True], ids=["host", "disk"])
def test_bytes_can_be_counted_without_reading(from_disk: bool, distilled: Path, tmp_path: Path) -> None:
    """A plan sees every factor before it is read, and how wide the widest branch is."""
    loaded = load_wan_transformer(write_tiny_wan(tmp_path), from_disk=from_disk)
    blocks = blocks_of(loaded.module)
    without = inventory_of(loaded.module, blocks)
    with applied(loaded, [LoraUse(distilled, 1.0)]):
        expected = inventory_of(loaded.module, blocks)
    with applied(loaded, [LoraUse(distilled, 1.0)], reads=False):
        assert inventory_of(loaded.module, blocks) == expected
        assert widest_branch(loaded.module) == 1536
    assert expected.total_bytes > without.total_bytes
    assert widest_branch(loaded.module) == 0


def test_factors_stay_on_disk_where_weights_do(distilled: Path, tmp_path: Path) -> None:
    """A machine without memory for the weights has none for a large LoRA either."""
    loaded = load_wan_transformer(write_tiny_wan(tmp_path), from_disk=True)
    with applied(loaded, [LoraUse(distilled, 1.0)]) as changed_one:
        name = "blocks.0.attn1.to_q.loras.0.down"
        assert changed_one.locations[name].path == distilled
        assert not any(loaded.module.get_parameter(name).stride())
        assert "blocks.0.scale_shift_table" not in changed_one.locations
    assert "blocks.0.scale_shift_table" in loaded.locations
    assert name not in loaded.locations


def test_an_unknown_naming_of_a_tiny_lora_is_refused(tmp_path: Path) -> None:
    """The error lists those that there are."""
    with pytest.raises(RequestError, match="need lora_A or lora_down or lora_unet or bare"):
        write_tiny_wan_lora(tmp_path, naming="lycoris")
