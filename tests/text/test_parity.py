"""Embeds have the bits of diffusers' WanPipeline, from every kind of file, wherever the weights are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowmem_core.text import EncodeOptions, encode_prompts, load_text_encoder
from lowmem_core.tiny import UMT5_KINDS

Written = Callable[[str, torch.dtype], Path]
Expected = Callable[[str, torch.dtype, str], Tensor]
LENGTH = 24
PROMPTS = (
    "a red boat on the sea, slow motion",
    "",
    "cats &amp;amp; waves &lt;white&gt;",
    "caf\u00e9 \u6d77\u732b \u2026 \U0001f30a  \t two\u00a0 spaces\n",
    "the cat with the white boat " * 20,
)
RESIDENT = EncodeOptions(LENGTH, limit_bytes=None)


@pytest.mark.parametrize("from_disk", [True, False], ids=["disk", "host"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", UMT5_KINDS)
def test_every_prompt_gets_the_bits_of_diffusers(
    kind: str, dtype: torch.dtype, from_disk: bool, written: Written, expected: Expected
) -> None:
    """Short, empty, escaped, foreign and overlong prompts, encoded together, equal diffusers' one by one."""
    loaded = load_text_encoder(written(kind, dtype), dtype, from_disk=from_disk)
    for prompt, embeds in zip(PROMPTS, encode_prompts(PROMPTS, loaded, "cpu", RESIDENT), strict=True):
        assert embeds.shape == (1, LENGTH, 32)
        assert torch.equal(embeds, expected(kind, dtype, prompt))


def test_float16_keeps_in_float32_what_transformers_keeps(written: Written, expected: Expected) -> None:
    """The output layers of the feed-forward parts overflow in float16."""
    loaded = load_text_encoder(written("diffusers", torch.float16), torch.float16)
    wo = loaded.stack.get_submodule("block.0.layer.1.DenseReluDense.wo")
    assert wo.weight.dtype == torch.float32
    for prompt, embeds in zip(PROMPTS, encode_prompts(PROMPTS, loaded, "cpu", RESIDENT), strict=True):
        assert torch.equal(embeds, expected("diffusers", torch.float16, prompt))


def test_fp8_weights_stay_fp8(written: Written) -> None:
    """All but norms and tables: that is what makes the file half as large."""
    loaded = load_text_encoder(written("comfyui_fp8", torch.bfloat16), from_disk=False)
    stored = [name for name, one in loaded.stack.named_parameters() if one.dtype == torch.float8_e4m3fn]
    assert len(stored) == 7 * loaded.config.num_layers


def test_embeds_come_in_the_dtype_that_was_asked_for(written: Written, expected: Expected) -> None:
    """As diffusers converts them: after the encoder."""
    loaded = load_text_encoder(written("comfyui", torch.float32), torch.float32)
    (embeds,) = encode_prompts(PROMPTS[:1], loaded, "cpu", EncodeOptions(LENGTH, torch.bfloat16))
    assert torch.equal(embeds, expected("comfyui", torch.float32, PROMPTS[0]).bfloat16())


def test_embeds_are_zero_after_the_prompt(written: Written) -> None:
    """What the encoder makes of padding is dropped."""
    loaded = load_text_encoder(written("comfyui", torch.float32), torch.float32)
    length = loaded.tokenizer.tokens("a cat", LENGTH).length
    (embeds,) = encode_prompts(["a cat"], loaded, "cpu", RESIDENT)
    assert not embeds[:, length:].any()
    assert embeds[:, :length].any(-1).all()


def test_the_pipeline_folder_and_the_encoder_folder_are_the_same(written: Written) -> None:
    """Both find the tokenizer."""
    folder = written("diffusers", torch.float32)
    whole, part = (load_text_encoder(path, torch.float32) for path in (folder, folder / "text_encoder"))
    a, b = (encode_prompts(PROMPTS[:1], one, "cpu", RESIDENT)[0] for one in (whole, part))
    assert torch.equal(a, b)


def test_the_twin_of_the_table_is_the_table(written: Written, tmp_path: Path) -> None:
    """Some files hold the table under its other name, some under both."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(written("comfyui", torch.float32))
    table = tensors["shared.weight"]
    expectation = encode_prompts(
        PROMPTS[:1], load_text_encoder(written("comfyui", torch.float32), torch.float32), "cpu", RESIDENT
    )[0]
    for names in (["encoder.embed_tokens.weight"], ["shared.weight", "encoder.embed_tokens.weight"]):
        tensors.pop("shared.weight", None)
        save_file(tensors | {name: table.clone() for name in names}, tmp_path / "x.safetensors")
        loaded = load_text_encoder(tmp_path / "x.safetensors", torch.float32)
        assert torch.equal(encode_prompts(PROMPTS[:1], loaded, "cpu", RESIDENT)[0], expectation)


def test_no_prompts_give_no_embeds(written: Written) -> None:
    """Nothing is placed for them."""
    assert encode_prompts([], load_text_encoder(written("comfyui", torch.float32)), "cpu") == []


def test_encoding_draws_no_random_numbers(written: Written) -> None:
    """A seed set before gives the same noise after."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    encode_prompts(PROMPTS[:1], load_text_encoder(written("comfyui", torch.float32)), "cpu", RESIDENT)
    assert torch.equal(torch.get_rng_state(), before)
