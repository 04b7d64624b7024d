"""LoRAs change a Wan transformer as if they were merged, with the bits of peft, wherever the weights are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lowmem_core.denoise import LoraUse
from lowmem_core.families.wan.load import LoadedTransformer, load_wan_transformer
from lowmem_core.families.wan.lora import applied
from lowmem_core.families.wan.placement import blocks_of
from lowmem_core.load import QuantisedLinear
from lowmem_core.load.lora_branch import LoraBranch
from lowmem_core.place import StreamOptions, inventory_of
from lowmem_core.place.streamer import StreamedModule, WeightStreamer
from lowmem_core.plan import plan_stream
from lowmem_core.tiny import WAN_KINDS, tiny_wan_config, write_tiny_wan, write_tiny_wan_lora
from lowmem_core.weights import wan_diffusers_name

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
PREFIX = "diffusion_model."
Tensors = dict[str, Tensor]


def changed(path: Path, change: Callable[[Tensors], Tensors], name: str = "") -> Path:
    """Rewrite a file with changed tensors, or write another one."""
    target = path.with_name(name or path.name)
    save_file(change({key: tensor.clone() for key, tensor in load_file(path).items()}), target)
    return target


def run(module: Any, kind: str = "t2v") -> Tensor:
    """Return a prediction of 48 tokens."""
    config, generator = tiny_wan_config(kind), torch.Generator().manual_seed(1)
    dtype = module.patch_embedding.weight.dtype
    latents = torch.randn(1, config.in_channels, 3, 8, 8, generator=generator).to(dtype)
    text = torch.randn(1, 512, config.text_dim, generator=generator).to(dtype)
    image = None if config.image_dim is None else torch.randn(1, 257, config.image_dim, generator=generator).to(dtype)
    with torch.no_grad():
        output: Tensor = module(latents, torch.tensor([500.0]), text, image, return_dict=False)[0]
    return output


def aligned(loaded: LoadedTransformer) -> LoadedTransformer:
    """Move weights to where an allocator puts them, as a streamer does.

    A mapped file starts them at any multiple of eight bytes, and the float32 kernels of a CPU sum in an order that
    depends on the start: the same weights at another address give other last bits.
    """
    for parameter in loaded.module.parameters():
        if not parameter.is_meta:
            parameter.data = parameter.data.clone()
    return loaded


def lora_run(loaded: LoadedTransformer, *uses: LoraUse, kind: str = "t2v") -> Tensor:
    """Return a prediction with LoRAs applied."""
    with applied(loaded, uses):
        return run(loaded.module, kind)


def streamed_run(loaded: LoadedTransformer, kind: str = "t2v") -> Tensor:
    """Return a prediction with every block streamed."""
    blocks = blocks_of(loaded.module)
    inventory = inventory_of(loaded.module, blocks)
    plan = plan_stream(inventory, inventory.smallest_bytes)
    with WeightStreamer(
        [StreamedModule(loaded.module, blocks, plan, loaded.locations)], CPU, StreamOptions(poison=True)
    ):
        return run(loaded.module, kind)


def merge(module: nn.Module, path: Path, strength: float) -> None:
    """Add a LoRA in the ``lora_down`` naming to the weights of a module."""
    lora = load_file(path)
    for key, tensor in lora.items():
        layer, _, ending = key.rpartition(".")
        ours = wan_diffusers_name(layer.removeprefix(PREFIX))
        if ending == "alpha":
            down, up = lora[f"{layer}.lora_down.weight"].float(), lora[f"{layer}.lora_up.weight"].float()
            module.get_parameter(f"{ours}.weight").data += strength * tensor.item() / len(down) * (up @ down)
        elif ending.startswith("diff"):
            leaf = ".bias" if ending == "diff_b" else "" if ours.endswith("table") else ".weight"
            module.get_parameter(ours + leaf).data += strength * tensor.float()


@pytest.mark.parametrize("partial", [False, True], ids=["whole", "partial"])
@pytest.mark.parametrize("kind", WAN_KINDS)
def test_a_lora_computes_what_merged_weights_compute(kind: str, partial: bool, tmp_path: Path) -> None:
    """Factors, alphas, and differences of weights, biases, norms, modulation and patches all count, to rounding."""
    path = write_tiny_wan(tmp_path, kind)
    lora = write_tiny_wan_lora(tmp_path, kind, "lora_down", partial=partial)
    loaded, merged = (load_wan_transformer(path, torch.float32) for _ in range(2))
    merge(merged.module, lora, 0.7)
    plain, expected = run(loaded.module, kind), run(merged.module, kind)
    found = lora_run(loaded, LoraUse(lora, 0.7), kind=kind)
    assert (expected - plain).abs().max() > 0.05 * plain.abs().max()
    assert (found - expected).abs().max() < 2e-6 * expected.abs().max()


def in_diffusers_names(key: str) -> str:
    """Return a key as diffusers saves it."""
    layer, dot, ending = key.removeprefix(PREFIX).partition(".lora_")
    return f"transformer.{wan_diffusers_name(layer)}{dot}{ending}"


def in_kohya_names(key: str) -> str:
    """Return a key as musubi-tuner saves it."""
    layer, _, ending = key.removeprefix(PREFIX).partition(".lora_")
    return f"lora_unet_{layer.replace('.', '_')}.lora_{ {'A': 'down', 'B': 'up'}[ending[0]] }.weight"


NAMINGS: dict[str, Callable[[str], str]] = {
    "bare": lambda key: key.removeprefix(PREFIX),
    "adapter": lambda key: key.replace(".weight", ".default.weight"),
    "peft": lambda key: key.replace(PREFIX, "base_model.model."),
    "down and up": lambda key: key.replace("lora_A", "lora_down").replace("lora_B", "lora_up"),
    "diffusers": in_diffusers_names,
    "kohya": in_kohya_names,
}


@pytest.mark.parametrize("partial", [False, True], ids=["whole", "partial"])
@pytest.mark.parametrize("naming", NAMINGS)
def test_every_naming_computes_the_same(naming: str, partial: bool, tmp_path: Path) -> None:
    """The same factors under other keys, in whole or in part, give the same bits."""
    loaded = load_wan_transformer(write_tiny_wan(tmp_path))
    lora = write_tiny_wan_lora(tmp_path, partial=partial)
    rename = NAMINGS[naming]
    other = changed(lora, lambda tensors: {rename(key): tensor for key, tensor in tensors.items()}, "other.safetensors")
    expected = lora_run(loaded, LoraUse(lora, 0.8))
    assert torch.equal(lora_run(loaded, LoraUse(other, 0.8)), expected)
    assert not torch.equal(run(loaded.module), expected)


def known_to_diffusers(tensors: Tensors) -> Tensors:
    """Leave out the differences that diffusers drops, and the alphas on which it fails."""

    def is_known(key: str) -> bool:
        is_difference = key.endswith(".diff") or "norm" in key or "patch" in key
        return "blocks" in key if key.endswith(".alpha") else key.endswith(".weight") or not is_difference

    return {key: tensor for key, tensor in tensors.items() if is_known(key)}


def diffusers_run(path: Path, loras: list[Path], dtype: torch.dtype, strengths: list[float]) -> Tensor:
    """Return the prediction of a model with LoRAs that diffusers loaded and peft applies."""
    from diffusers.loaders.lora_pipeline import WanLoraLoaderMixin

    transformer: Any = load_wan_transformer(path, dtype).module
    names = [f"number_{number}" for number in range(len(loras))]
    for name, lora in zip(names, loras, strict=True):
        state = WanLoraLoaderMixin.lora_state_dict(load_file(lora))
        WanLoraLoaderMixin.load_lora_into_transformer(state, transformer, adapter_name=name)
    transformer.set_adapters(names, weights=strengths)
    return run(transformer)


@DTYPES
@pytest.mark.parametrize("strength", [1.0, 0.7])
@pytest.mark.parametrize("naming", ["lora_A", "lora_down", "lora_unet"])
def test_a_lora_has_the_bits_of_peft(naming: str, dtype: torch.dtype, strength: float, tmp_path: Path) -> None:
    """What diffusers loads from the same file does the same operations in the same order."""
    pytest.importorskip("peft")
    path = write_tiny_wan(tmp_path)
    lora = changed(write_tiny_wan_lora(tmp_path, naming=naming), known_to_diffusers)
    found = lora_run(load_wan_transformer(path, dtype), LoraUse(lora, strength))
    assert torch.equal(found, diffusers_run(path, [lora], dtype, [strength]))


@DTYPES
@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
def test_several_loras_have_the_bits_of_peft(dtype: torch.dtype, tmp_path: Path) -> None:
    """They are added one after the other, in the order that was asked for."""
    pytest.importorskip("peft")
    path = write_tiny_wan(tmp_path)
    loras = [
        write_tiny_wan_lora(tmp_path, naming=naming, seed=seed) for seed, naming in enumerate(("lora_A", "lora_unet"))
    ]
    loaded, (first, second) = load_wan_transformer(path, dtype), (LoraUse(loras[0], 0.6), LoraUse(loras[1], -0.3))
    found = lora_run(loaded, first, second)
    assert torch.equal(found, diffusers_run(path, loras, dtype, [0.6, -0.3]))
    assert not torch.equal(found, lora_run(loaded, first))


@DTYPES
@pytest.mark.parametrize("from_disk", [False, True], ids=["host", "disk"])
@pytest.mark.parametrize("kind", ["t2v", "i2v_image"])
def test_streamed_loras_have_plain_bits(kind: str, from_disk: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """Factors travel with their block, and changed norms, tables and patches count too, from memory and from disk."""
    path = write_tiny_wan(tmp_path, kind)
    uses = [LoraUse(write_tiny_wan_lora(tmp_path, kind, "lora_down", seed=seed), 0.5) for seed in range(2)]
    expected = lora_run(load_wan_transformer(path, dtype), *uses, kind=kind)
    loaded = load_wan_transformer(path, dtype, from_disk=from_disk)
    plain = streamed_run(loaded, kind)
    with applied(loaded, uses) as changed_one:
        assert inventory_of(loaded.module, blocks_of(loaded.module)).block_bytes[0] > 100_000
        assert torch.equal(streamed_run(changed_one, kind), expected)
    assert torch.equal(streamed_run(loaded, kind), plain)


def to_fp8(tensors: Tensors) -> Tensors:
    """Store linear weights in fp8."""
    is_linear = {name: name.endswith(".weight") and tensor.ndim == 2 for name, tensor in tensors.items()}
    return {name: tensor.to(torch.float8_e4m3fn) if is_linear[name] else tensor for name, tensor in tensors.items()}


def write_gguf(path: Path, tensors: Tensors) -> Tensors:
    """Write a GGUF file with linear weights in Q8_0 and the rest in float32; return what it stands for."""
    gguf = pytest.importorskip("gguf")
    kind, writer, values = gguf.GGMLQuantizationType.Q8_0, gguf.GGUFWriter(str(path), "wan"), {}
    for name, tensor in tensors.items():
        values[name] = tensor.float()
        if name.endswith(".weight") and tensor.ndim == 2:
            raw = gguf.quants.quantize(tensor.float().numpy(), kind)
            writer.add_tensor(name, raw, raw_dtype=kind)
            values[name] = torch.from_numpy(gguf.quants.dequantize(raw, kind))
        else:
            if tensor.ndim == 5:
                writer.add_array(f"comfy.gguf.orig_shape.{name}", list(tensor.shape))
                tensor = tensor.flatten(2)
            writer.add_tensor(name, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@DTYPES
@pytest.mark.parametrize("form", ["fp8", "gguf"])
@pytest.mark.parametrize("from_disk", [False, True], ids=["host", "disk"])
def test_quantised_weights_take_loras(form: str, from_disk: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """The base stays in its few bits, and the prediction has the bits of the dequantised model with the LoRA."""
    plain = write_tiny_wan(tmp_path)
    use = LoraUse(write_tiny_wan_lora(tmp_path, naming="lora_down"), 0.7)
    quantised = tmp_path / f"quantised.{'gguf' if form == 'gguf' else 'safetensors'}"
    if form == "gguf":
        values = write_gguf(quantised, load_file(plain))
    else:
        values = {name: tensor.float() for name, tensor in load_file(changed(plain, to_fp8, quantised.name)).items()}
    save_file(values, plain)
    expected = lora_run(aligned(load_wan_transformer(plain, dtype)), use)
    loaded = load_wan_transformer(quantised, dtype, from_disk=from_disk)
    if not from_disk:
        aligned(loaded)
    assert any(isinstance(layer, QuantisedLinear) for layer in loaded.module.modules())
    with applied(loaded, [use]) as changed_one:
        assert torch.equal(streamed_run(changed_one), expected)
        assert from_disk or torch.equal(run(loaded.module), expected)


@DTYPES
@pytest.mark.parametrize("naming", ["lora_down", "lora_unet"])
def test_chunks_of_tokens_have_plain_bits(naming: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """A lean transformer calls layers for 16 tokens at a time, and gets the same from each branch."""
    lean = pytest.importorskip("lowmem_core.families.wan.lean").lean
    loaded = load_wan_transformer(write_tiny_wan(tmp_path), dtype)
    use = LoraUse(write_tiny_wan_lora(tmp_path, naming=naming, rank=8), 0.7)
    with applied(loaded, [use]):
        expected = run(loaded.module)
        with lean(loaded.module, 16):
            assert torch.equal(run(loaded.module), expected)


@DTYPES
@pytest.mark.parametrize("rank", [2, 4, 16, 20, 64])
def test_a_branch_computes_each_row_alone(rank: int, dtype: torch.dtype) -> None:
    """From 16 rows on, how many rows are computed together changes no bit."""
    torch.manual_seed(0)
    branch = LoraBranch({"down": (rank, 256), "up": (384, rank), "bias": (384,)}, dtype, 0.3, 0.7)
    for parameter in branch.parameters():
        parameter.data = torch.randn(parameter.shape).to(dtype)
    values, output = torch.randn(100, 256).to(dtype), torch.randn(100, 384).to(dtype)
    expected, before = branch(values, output), output.clone()
    for rows in (16, 17, 24, 31, 50):
        assert torch.equal(branch(values[:rows], output[:rows]), expected[:rows])
    assert torch.equal(output, before)


def test_a_whole_difference_of_a_linear_weight_is_added(tmp_path: Path) -> None:
    """A file may hold a difference in place of factors, or beside them."""
    path = write_tiny_wan(tmp_path)
    lora = write_tiny_wan_lora(tmp_path, naming="lora_down", partial=True)
    layer = f"{PREFIX}blocks.0.ffn.2"
    extra = {f"{layer}.diff": 0.05 * torch.randn(256, 384), f"{layer}.diff_b": torch.randn(256)}
    changed(lora, lambda tensors: {**{key: one for key, one in tensors.items() if not key.endswith("_b")}, **extra})
    loaded, merged = (load_wan_transformer(path, torch.float32) for _ in range(2))
    merge(merged.module, lora, -0.5)
    expected = run(merged.module)
    assert (lora_run(loaded, LoraUse(lora, -0.5)) - expected).abs().max() < 2e-6 * expected.abs().max()


def test_inside_inference_mode_nothing_is_different(tmp_path: Path) -> None:
    """ComfyUI runs nodes in inference mode."""
    path, use = write_tiny_wan(tmp_path), LoraUse(write_tiny_wan_lora(tmp_path, naming="lora_down"), 0.5)
    expected = lora_run(load_wan_transformer(path), use)
    loaded = load_wan_transformer(path)
    with torch.inference_mode():
        with applied(loaded, [use]) as changed_one:
            assert torch.equal(streamed_run(changed_one), expected)
            assert torch.equal(run(loaded.module), expected)
        assert not torch.equal(run(loaded.module), expected)
