"""Every form in which Wan transformers are published loads to the same model, or is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowmem_core.errors import CheckpointError
from lowmem_core.families.wan.config import WanConfig
from lowmem_core.families.wan.load import LoadedTransformer, load_wan_transformer
from lowmem_core.families.wan.placement import blocks_of
from lowmem_core.load import QuantisedLinear, build_skeleton
from lowmem_core.place import streamed
from lowmem_core.place.layout import inventory_of
from lowmem_core.place.streamer import StreamedModule, WeightStreamer
from lowmem_core.plan import plan_stream
from lowmem_core.tiny import WAN_KINDS, tiny_wan_config, tiny_wan_tensors, write_tiny_wan
from lowmem_core.weights import wan_diffusers_name, wan_original_name

CPU = torch.device("cpu")
Tensors = dict[str, Tensor]


def changed(path: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """Rewrite a file with changed tensors."""
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(change(tensors), path)
    return path


def is_linear(name: str, tensor: Tensor) -> bool:
    """Whether a conversion to few bits would take this tensor."""
    return name.endswith(".weight") and tensor.ndim == 2 and "norm" not in name


def scaled(tensors: Tensors, scale_leaf: str, note: bool) -> Tensors:
    """Store linear weights as fp8 with a scale each."""
    result: Tensors = {}
    for name, tensor in tensors.items():
        if not is_linear(name, tensor):
            result[name] = tensor
            continue
        layer = name.removesuffix(".weight")
        scale = tensor.float().abs().max() / 448
        result[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
        result[f"{layer}.{scale_leaf}"] = scale if note else scale.reshape(1)
        if note:
            text = json.dumps({"format": "float8_e4m3fn"}).encode()
            result[f"{layer}.comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
            result[f"{layer}.input_scale"] = torch.ones(())
    if not note:
        result["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    return result


FORMS: dict[str, Callable[[Tensors], Tensors]] = {
    "original": lambda tensors: tensors,
    "prefixed": lambda tensors: {f"model.diffusion_model.{name}": tensor for name, tensor in tensors.items()},
    "short prefix": lambda tensors: {f"diffusion_model.{name}": tensor for name, tensor in tensors.items()},
    "diffusers names": lambda tensors: {wan_diffusers_name(name): tensor for name, tensor in tensors.items()},
    "fp16": lambda tensors: {name: tensor.half() for name, tensor in tensors.items()},
    "fp8": lambda tensors: {n: t.to(torch.float8_e4m3fn) if is_linear(n, t) else t for n, t in tensors.items()},
    "all fp8": lambda tensors: {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors.items()},
    "scaled_fp8": lambda tensors: scaled(tensors, "scale_weight", note=False),
    "comfy_quant": lambda tensors: scaled(tensors, "weight_scale", note=True),
}


def plain_values(path: Path) -> Tensors:
    """Return what a file stands for, in float32 under diffusers' names: the reference for every form."""
    stored, values = load_file(path), {}
    for name, tensor in stored.items():
        short = name.removeprefix("model.").removeprefix("diffusion_model.")
        if name.endswith((".scale_weight", ".weight_scale", "comfy_quant", "input_scale", "scaled_fp8")):
            continue
        layer = name.removesuffix(".weight")
        scale = stored.get(f"{layer}.scale_weight", stored.get(f"{layer}.weight_scale"))
        values[wan_diffusers_name(short)] = tensor.float() if scale is None else tensor.float() * scale
    return values


def plain_module(kind: str, values: Tensors, dtype: torch.dtype) -> Any:
    """Return diffusers' model with these values, in the dtypes that ``from_pretrained`` gives them."""
    module = WanTransformer3DModel(**tiny_wan_config(kind).diffusers_arguments())
    module.load_state_dict(values)
    keep = set(WanTransformer3DModel._keep_in_fp32_modules)
    for name, parameter in module.named_parameters():
        if keep.isdisjoint(name.split(".")):
            parameter.data = parameter.data.to(dtype)
    return module.eval().requires_grad_(False)


def run(module: Any, kind: str, dtype: torch.dtype) -> Tensor:
    """Return a prediction."""
    config, generator = tiny_wan_config(kind), torch.Generator().manual_seed(1)
    latents = torch.randn(1, config.in_channels, 3, 8, 8, generator=generator).to(dtype)
    text = torch.randn(1, 7, config.text_dim, generator=generator).to(dtype)
    image = None if config.image_dim is None else torch.randn(1, 257, config.image_dim, generator=generator).to(dtype)
    with torch.no_grad():
        output: Tensor = module(latents, torch.tensor([500.0]), text, image, return_dict=False)[0]
    return output


@pytest.mark.parametrize("kind", WAN_KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_computes_what_diffusers_computes(kind: str, form: str, tmp_path: Path) -> None:
    """The prediction has the bits of diffusers' model with the dequantised weights."""
    path = changed(write_tiny_wan(tmp_path, kind), FORMS[form])
    loaded = load_wan_transformer(path, torch.bfloat16)
    plain = plain_module(kind, plain_values(path), torch.bfloat16)
    assert loaded.config == tiny_wan_config(kind)
    assert torch.equal(run(loaded.module, kind, torch.bfloat16), run(plain, kind, torch.bfloat16))


@pytest.mark.parametrize(("form", "dtype"), [("original", torch.bfloat16), ("fp16", torch.float16)])
def test_the_dtype_of_a_plain_file_is_kept(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Without a wish the file decides."""
    assert load_wan_transformer(changed(write_tiny_wan(tmp_path), FORMS[form])).dtype == dtype


def test_float32_is_kept_where_diffusers_keeps_it(tmp_path: Path) -> None:
    """Loading a folder gives the tensors and dtypes of ``from_pretrained``."""
    plain = plain_module("i2v_image", tiny_wan_tensors("i2v_image"), torch.float32)
    plain.save_pretrained(tmp_path / "transformer", max_shard_size="4MB")
    theirs = WanTransformer3DModel.from_pretrained(tmp_path / "transformer", torch_dtype=torch.bfloat16)
    ours = load_wan_transformer(tmp_path, torch.bfloat16).module.state_dict()
    assert {name: tensor.dtype for name, tensor in ours.items()} == {
        name: tensor.dtype for name, tensor in theirs.state_dict().items()
    }
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.state_dict().items())


@pytest.mark.parametrize("form", ["fp8", "scaled_fp8", "comfy_quant"])
def test_quantised_weights_stay_small(form: str, tmp_path: Path) -> None:
    """Linear weights take one byte each, in host memory and on their way to the device."""
    loaded = load_wan_transformer(changed(write_tiny_wan(tmp_path), FORMS[form]))
    layers = [layer for layer in loaded.module.modules() if isinstance(layer, QuantisedLinear)]
    assert len(layers) == 10 * loaded.config.num_layers + 4
    assert all(layer.weight.element_size() == 1 for layer in layers)
    assert loaded.dtype == torch.bfloat16


def stream(loaded: LoadedTransformer, kind: str) -> Tensor:
    """Return a prediction with at most three of five blocks on the device, released slots poisoned."""
    from lowmem_core.place import StreamOptions

    blocks = blocks_of(loaded.module)
    inventory = inventory_of(loaded.module, blocks)
    plan = plan_stream(inventory, inventory.smallest_bytes)
    member = StreamedModule(loaded.module, blocks, plan, loaded.locations or None)
    with WeightStreamer([member], CPU, StreamOptions(poison=True)):
        return run(loaded.module, kind, loaded.dtype)


@pytest.mark.parametrize("kind", ["i2v_image", "ti2v"])
@pytest.mark.parametrize("form", ["original", "fp8", "all fp8", "scaled_fp8", "comfy_quant"])
@pytest.mark.parametrize("from_disk", [False, True], ids=["host", "disk"])
def test_streamed_weights_give_the_same_bits(kind: str, form: str, from_disk: bool, tmp_path: Path) -> None:
    """From host memory and from disk, quantised or not."""
    path = changed(write_tiny_wan(tmp_path, kind), FORMS[form])
    resident = load_wan_transformer(path)
    loaded = load_wan_transformer(path, from_disk=from_disk)
    assert bool(loaded.locations) == from_disk
    assert torch.equal(stream(loaded, kind), run(resident.module, kind, resident.dtype))


def test_nothing_is_read_that_stays_on_disk(tmp_path: Path) -> None:
    """Every tensor of a plain file is left where it is; rotary tables, which no file holds, are here."""
    loaded = load_wan_transformer(write_tiny_wan(tmp_path), from_disk=True)
    assert set(loaded.locations) == set(loaded.module.state_dict())
    assert all(parameter.isnan().all() for parameter in loaded.module.parameters())


REAL = {
    "Wan 2.1 T2V 1.3B": WanConfig((1, 2, 2), 12, 128, 16, 16, 4096, 256, 8960, 30),
    "Wan 2.1 T2V 14B": WanConfig((1, 2, 2), 40, 128, 16, 16, 4096, 256, 13824, 40),
    "Wan 2.2 I2V A14B": WanConfig((1, 2, 2), 40, 128, 36, 16, 4096, 256, 13824, 40),
    "Wan 2.2 TI2V 5B": WanConfig((1, 2, 2), 24, 128, 48, 48, 4096, 256, 14336, 30),
    "Wan 2.1 I2V 14B": WanConfig(
        (1, 2, 2), 40, 128, 36, 16, 4096, 256, 13824, 40, image_dim=1280, added_kv_proj_dim=5120
    ),
    "Wan 2.1 FLF2V 14B": WanConfig(
        (1, 2, 2), 40, 128, 36, 16, 4096, 256, 13824, 40, image_dim=1280, added_kv_proj_dim=5120, pos_embed_seq_len=514
    ),
}


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("original", [True, False], ids=["original", "diffusers"])
def test_shapes_tell_the_configuration_of_released_models(name: str, original: bool) -> None:
    """At real size, under both kinds of names, and the key map is one to one."""
    skeleton = build_skeleton(WanTransformer3DModel, REAL[name].diffusers_arguments())
    shapes = {key: tuple(tensor.shape) for key, tensor in skeleton.state_dict().items()}
    if original:
        renamed = {wan_original_name(key): shape for key, shape in shapes.items()}
        assert len(renamed) == len(shapes)
        shapes = {wan_diffusers_name(key): shape for key, shape in renamed.items()}
    assert WanConfig.of_shapes(shapes, "test") == REAL[name]


def without(*names: str) -> Callable[[Tensors], Tensors]:
    """Leave tensors out."""
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


BAD: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "a missing tensor": (without("blocks.3.ffn.2.bias"), r"1 missing: blocks\.3\.ffn\.net\.2\.bias"),
    "a foreign tensor": (lambda tensors: tensors | {"x": torch.ones(1)}, "1 unexpected: x"),
    "another shape": (
        lambda tensors: tensors | {"blocks.1.norm3.bias": torch.ones(3)},
        r"blocks\.1\.norm3\.bias .* is \[3\], not \[256\]",
    ),
    "VACE": (lambda tensors: tensors | {"vace_patch_embedding.bias": torch.ones(1)}, "VACE"),
    "no head": (without("head.head.weight"), "proj_out.weight"),
    "no Wan model": (lambda tensors: {"a": torch.ones(1)}, "holds no Wan transformer"),
    "an odd width": (
        lambda tensors: tensors | {"patch_embedding.weight": torch.ones(100, 16, 1, 2, 2)},
        "attention heads",
    ),
    "integers": (
        lambda tensors: tensors | {"blocks.0.ffn.0.weight": torch.ones(384, 256, dtype=torch.int8)},
        "cannot be read: blocks.0.ffn.0.weight",
    ),
    "scaled fp8 without scales": (
        lambda tensors: without("blocks.0.ffn.0.scale_weight")(scaled(tensors, "scale_weight", note=False)),
        r"lacks the scale of 'blocks\.0\.ffn\.0\.weight'",
    ),
    "noted fp8 without scales": (
        lambda tensors: without("blocks.0.ffn.0.weight_scale")(scaled(tensors, "weight_scale", note=True)),
        r"lacks the scale of 'blocks\.0\.ffn\.0\.weight'",
    ),
    "a note of another format": (
        lambda tensors: (
            scaled(tensors, "weight_scale", note=True)
            | {"blocks.0.ffn.0.comfy_quant": torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8)}
        ),
        "nvfp4",
    ),
    "a scale of an odd shape": (
        lambda tensors: scaled(tensors, "scale_weight", note=False) | {"blocks.0.ffn.0.scale_weight": torch.ones(7)},
        "scale of another shape",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_work_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """Silent garbage is worse than an error."""
    change, message = BAD[name]
    with pytest.raises(CheckpointError, match=message):
        load_wan_transformer(changed(write_tiny_wan(tmp_path), change))


def test_a_cut_off_file_names_the_tensor(tmp_path: Path) -> None:
    """A broken download is known before anything is loaded."""
    path = write_tiny_wan(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="is cut off: tensor"):
        load_wan_transformer(path)


def test_a_pth_file_loads(tmp_path: Path) -> None:
    """PyTorch files work as well, also where weights are to be left on disk: they are mapped."""
    tensors = load_file(write_tiny_wan(tmp_path))
    torch.save(tensors, tmp_path / "wan.pth")
    loaded = load_wan_transformer(tmp_path / "wan.pth", from_disk=True)
    assert not loaded.locations
    with streamed(
        loaded.module, blocks_of(loaded.module), plan_stream(inventory_of(loaded.module, blocks_of(loaded.module))), CPU
    ):
        found = run(loaded.module, "t2v", torch.bfloat16)
    assert torch.equal(
        found,
        run(
            plain_module("t2v", plain_values(tmp_path / "wan_t2v_tiny.safetensors"), torch.bfloat16),
            "t2v",
            torch.bfloat16,
        ),
    )
