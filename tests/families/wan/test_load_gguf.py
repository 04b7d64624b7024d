"""GGUF files of Wan transformers: packed weights stay packed and give the numbers of the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from lowmem_core.errors import CheckpointError
from lowmem_core.families.wan.load import load_wan_transformer
from lowmem_core.families.wan.placement import blocks_of
from lowmem_core.load import QuantisedLinear
from lowmem_core.load.gguf_dequant import GGUF_BLOCKS
from lowmem_core.place import StreamOptions, inventory_of
from lowmem_core.place.streamer import StreamedModule, WeightStreamer
from lowmem_core.plan import plan_stream
from lowmem_core.tiny import tiny_wan_config, tiny_wan_tensors
from lowmem_core.weights import Checkpoint, wan_original_name

gguf = pytest.importorskip("gguf")
CPU = torch.device("cpu")
KINDS = ["Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
HALF_FIELDS = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def packed(kind: str, tensor: Tensor, seed: int) -> np.ndarray:
    """Return a weight in packed blocks; the package cannot make K types, so those get random bits."""
    if kind not in HALF_FIELDS:
        return np.asarray(gguf.quants.quantize(tensor.numpy(), gguf.GGMLQuantizationType[kind]))
    block = GGUF_BLOCKS[kind]
    random = np.random.default_rng(seed)
    count = tensor.numel() // block.elements
    blocks = random.integers(0, 256, (count, block.nbytes), dtype=np.uint8)
    for offset in HALF_FIELDS[kind]:
        scales = (np.abs(random.standard_normal((count, 1))) * 1e-4).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8)
    return blocks.reshape(tensor.shape[0], -1)


def write_gguf(path: Path, kind: str) -> dict[str, Tensor]:
    """Write a tiny model as converters do; return what it stands for, float32 under diffusers' names."""
    writer, values = gguf.GGUFWriter(str(path), "wan"), {}
    for seed, (ours, tensor) in enumerate(tiny_wan_tensors("t2v").items()):
        name = wan_original_name(ours)
        is_packed = ours.endswith(".weight") and tensor.ndim == 2 and "norm" not in ours
        if is_packed and tensor.shape[1] % GGUF_BLOCKS[kind].elements == 0:
            raw = packed(kind, tensor, seed)
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
            values[ours] = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))
        elif tensor.ndim == 5:
            writer.add_array(f"comfy.gguf.orig_shape.{name}", list(tensor.shape))
            half = tensor.half()
            writer.add_tensor(name, half.reshape(*half.shape[:2], -1).numpy())
            values[ours] = half.float()
        elif ours.endswith(".bias"):
            rounded = tensor.bfloat16()
            raw = rounded.view(torch.int16).numpy().view(np.uint8)
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
            values[ours] = rounded.float()
        else:
            writer.add_tensor(name, tensor.numpy())
            values[ours] = tensor
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def run(module: Any, dtype: torch.dtype) -> Tensor:
    """Return a prediction."""
    config, generator = tiny_wan_config("t2v"), torch.Generator().manual_seed(1)
    latents = torch.randn(1, config.in_channels, 3, 8, 8, generator=generator).to(dtype)
    text = torch.randn(1, 7, config.text_dim, generator=generator).to(dtype)
    with torch.no_grad():
        output: Tensor = module(latents, torch.tensor([500.0]), text, return_dict=False)[0]
    return output


def plain_run(values: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return the prediction of diffusers' model with dequantised weights."""
    module = WanTransformer3DModel(**tiny_wan_config("t2v").diffusers_arguments())
    module.load_state_dict(values)
    keep = set(WanTransformer3DModel._keep_in_fp32_modules)
    for name, parameter in module.named_parameters():
        if keep.isdisjoint(name.split(".")):
            parameter.data = parameter.data.to(dtype)
    return run(module.eval(), dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("from_disk", [False, True], ids=["host", "disk"])
def test_packed_weights_compute_what_the_package_says(
    kind: str, dtype: torch.dtype, from_disk: bool, tmp_path: Path
) -> None:
    """Resident and streamed, the prediction has the bits of diffusers' model with dequantised weights."""
    path = tmp_path / "wan.gguf"
    expected = plain_run(write_gguf(path, kind), dtype)
    loaded = load_wan_transformer(path, dtype, from_disk=from_disk)
    layers = [layer for layer in loaded.module.modules() if isinstance(layer, QuantisedLinear)]
    assert layers
    assert all(layer.weight.dtype == torch.uint8 for layer in layers)
    if not from_disk:
        assert torch.equal(run(loaded.module, dtype), expected)
    blocks = blocks_of(loaded.module)
    inventory = inventory_of(loaded.module, blocks)
    plan = plan_stream(inventory, inventory.smallest_bytes)
    member = StreamedModule(loaded.module, blocks, plan, loaded.locations or None)
    with WeightStreamer([member], CPU, StreamOptions(poison=True)):
        assert torch.equal(run(loaded.module, dtype), expected)


def test_without_a_wish_a_gguf_file_computes_in_bf16(tmp_path: Path) -> None:
    """Its side tensors say nothing about the wish of the model."""
    write_gguf(tmp_path / "wan.gguf", "Q8_0")
    assert load_wan_transformer(tmp_path / "wan.gguf").dtype == torch.bfloat16


def test_shapes_and_packed_types_are_told_without_reading(tmp_path: Path) -> None:
    """Five dimensions come from the note that converters leave."""
    write_gguf(tmp_path / "wan.gguf", "Q4_K")
    checkpoint = Checkpoint.open(tmp_path / "wan.gguf")
    assert str(checkpoint["blocks.0.self_attn.q.weight"]) == "Q4_K [256, 256]"
    assert str(checkpoint["patch_embedding.weight"]) == "F16 [256, 16, 1, 2, 2]"
    assert str(checkpoint["patch_embedding.bias"]) == "BF16 [256]"


def test_a_cut_off_file_names_the_tensor(tmp_path: Path) -> None:
    """A broken download is known before anything is loaded."""
    path = tmp_path / "wan.gguf"
    write_gguf(path, "Q8_0")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="is cut off: tensor"):
        Checkpoint.open(path)


def test_another_file_is_refused(tmp_path: Path) -> None:
    """The suffix alone makes no GGUF file."""
    (tmp_path / "wan.gguf").write_bytes(b"GGUX" + bytes(100))
    with pytest.raises(CheckpointError, match=r"cannot read .* as a GGUF file"):
        Checkpoint.open(tmp_path / "wan.gguf")
