"""What cannot be a UMT5 encoder is refused before it computes, with a reason and a remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowmem_core.errors import CheckpointError, NotFiniteError, RequestError
from lowmem_core.text import EncodeOptions, encode_prompts, load_text_encoder
from lowmem_core.text.config import Umt5Config
from lowmem_core.tiny import UMT5_KINDS, tiny_umt5_config, tiny_umt5_tensors, write_tiny_umt5
from lowmem_core.weights.t5_keys import umt5_name, umt5_original_name

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]
OPTIONS = EncodeOptions(8)


def changed(folder: Path, change: Change, kind: str = "comfyui") -> Path:
    """Write a tiny encoder whose tensors were changed."""
    path = write_tiny_umt5(folder, kind)
    tensors = change(load_file(path))
    save_file(tensors, path)
    return path


def without(*endings: str) -> Change:
    """Return a change that drops the tensors whose names end so."""
    return lambda tensors: {name: one for name, one in tensors.items() if not name.endswith(endings)}


def as_t5(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Keep one position table for all blocks, as T5 has."""
    second = [name for name in tensors if "relative_attention_bias" in name and "block.0." not in name]
    return without(*second)(tensors)


def as_plain_t5(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drop the gate, which the first T5 had not."""
    return {name.replace("wi_0", "wi"): one for name, one in tensors.items() if "wi_1" not in name}


def as_clip(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with other names altogether."""
    return {"text_model.encoder.layers.0.self_attn.q_proj.weight": torch.zeros(4, 4)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (as_t5, "is a T5 encoder, not UMT5"),
        (as_plain_t5, "have plain ones, wi"),
        (as_clip, "holds no UMT5 text encoder.*text_model"),
        (without("spiece_model"), "carries no tokenizer.*Give a tokenizer"),
        (without("shared.weight"), r"need tensor 'shared\.weight'"),
        (without("block.3.layer.1.DenseReluDense.wo.weight"), r"1 missing: block\.3\.layer\.1\.DenseReluDense\.wo"),
        (lambda tensors: tensors | {"decoder.block.0.x.weight": torch.zeros(2, 2)}, "1 unexpected: decoder"),
        (lambda tensors: tensors | {"encoder.final_layer_norm.weight": torch.ones(31)}, "1 of another shape"),
        (lambda tensors: tensors | {"encoder.final_layer_norm.weight": torch.ones(32).int()}, "cannot be read"),
        (lambda tensors: tensors | {"spiece_model": torch.zeros(8)}, "tokenizer in .* is damaged"),
        (lambda tensors: tensors | {"spiece_model": tensors["spiece_model"][:-7].clone()}, "tokenizer in .* damaged"),
    ],
    ids=["T5", "plain T5", "CLIP", "spiece", "table", "part", "more", "shape", "integer", "floats", "cut spiece"],
)
def test_another_or_incomplete_model_is_refused(change: Change, message: str, tmp_path: Path) -> None:
    """The message names the file and what is wrong with it."""
    with pytest.raises(CheckpointError, match=message) as caught:
        load_text_encoder(changed(tmp_path, change))
    assert "umt5_tiny.safetensors" in str(caught.value)


def test_scaled_fp8_without_its_scales_is_an_error(tmp_path: Path) -> None:
    """It would load, and encode garbage."""
    with pytest.raises(CheckpointError, match=r"lacks the scale of 'encoder.block.*silently wrong"):
        load_text_encoder(changed(tmp_path, without("wo.scale_weight"), "comfyui_fp8"))


def test_plain_fp8_needs_no_scales(tmp_path: Path) -> None:
    """Without the mark the values are what they are: the same as those in a wider type."""

    def fp8(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        narrow = (one.to(torch.float8_e4m3fn) if one.ndim == 2 else one for one in tensors.values())
        return dict(zip(tensors, narrow, strict=True))

    def rounded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: one if name == "spiece_model" else one.bfloat16() for name, one in fp8(tensors).items()}

    paths = [changed(tmp_path / change.__name__, change) for change in (fp8, rounded)]
    got, want = (encode_prompts(["a cat"], load_text_encoder(path), "cpu", OPTIONS)[0] for path in paths)
    assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ["comfyui", "comfyui_fp8", "original", "diffusers"])
def test_a_truncated_file_is_refused(kind: str, tmp_path: Path) -> None:
    """At loading, whatever its form."""
    path = write_tiny_umt5(tmp_path, kind)
    file = path / "text_encoder" / "model.safetensors" if path.is_dir() else path
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"cut off|cannot read"):
        load_text_encoder(path)


def test_values_that_overflow_are_an_error(tmp_path: Path) -> None:
    """Float16 ends at 65504; NaN embeds would make black frames an hour later."""

    def large(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: one * 3e3 if ".wi_" in name else one for name, one in tensors.items()}

    path = changed(tmp_path, large)
    with pytest.raises(NotFiniteError, match=r"have torch.float16.*bfloat16 or float32"):
        encode_prompts(["a cat"], load_text_encoder(path, torch.float16), "cpu", OPTIONS)
    encode_prompts(["a cat"], load_text_encoder(path), "cpu", OPTIONS)


def test_a_tokenizer_of_another_model_is_noticed(tmp_path: Path) -> None:
    """Its tokens lie beyond the table."""

    def small(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors | {"shared.weight": tensors["shared.weight"][:5].clone()}

    loaded = load_text_encoder(changed(tmp_path, small))
    with pytest.raises(CheckpointError, match=r"tokenizer is not that of .*need tokens below 5"):
        encode_prompts(["a cat"], loaded, "cpu", OPTIONS)


def test_a_file_without_a_tokenizer_can_be_given_one(tmp_path: Path) -> None:
    """As files made by other tools need."""
    path = changed(tmp_path, without("spiece_model"))
    other = write_tiny_umt5(tmp_path / "other", "diffusers")
    for tokenizer in (other, other / "tokenizer", other / "tokenizer" / "spiece.model"):
        loaded = load_text_encoder(path, tokenizer=tokenizer)
        assert encode_prompts(["a cat"], loaded, "cpu", OPTIONS)[0].any()


@pytest.mark.parametrize("length", [0, 1, -3])
def test_embeds_without_room_are_refused(length: int, tmp_path: Path) -> None:
    """The end of the prompt takes a token itself."""
    with pytest.raises(RequestError, match="need 2 tokens or more"):
        encode_prompts(["a"], load_text_encoder(write_tiny_umt5(tmp_path)), "cpu", EncodeOptions(length))


def test_a_dtype_that_computes_nothing_is_refused(tmp_path: Path) -> None:
    """Fp8 is how files store, not what is computed in."""
    with pytest.raises(RequestError, match=r"need torch.bfloat16, torch.float16, torch.float32"):
        load_text_encoder(tmp_path / "x.safetensors", torch.float8_e4m3fn)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """The message names it."""
    with pytest.raises(CheckpointError, match=r"there is no file .*x\.safetensors"):
        load_text_encoder(tmp_path / "x.safetensors")


def test_an_unknown_tiny_kind_is_refused(tmp_path: Path) -> None:
    """The message lists the kinds."""
    with pytest.raises(RequestError, match=" or ".join(UMT5_KINDS)):
        write_tiny_umt5(tmp_path, "gguf")


def test_the_configuration_is_read_from_shapes() -> None:
    """Every number of the tiny encoder, without a config.json."""
    shapes = {name: tuple(one.shape) for name, one in tiny_umt5_tensors().items()}
    assert Umt5Config.of_shapes(shapes, "x") == tiny_umt5_config()


def test_every_name_goes_to_the_original_files_and_back() -> None:
    """Wan's own names, for each tensor."""
    names = list(tiny_umt5_tensors())
    originals = [umt5_original_name(name) for name in names]
    assert [umt5_name(name) for name in originals] == names
    assert "blocks.2.pos_embedding.embedding.weight" in originals
    assert {"token_embedding.weight", "norm.weight", "blocks.5.ffn.gate.0.weight"} <= set(originals)
