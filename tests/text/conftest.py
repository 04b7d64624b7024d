"""Tiny text encoders of every kind, and what diffusers makes of prompts with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline
from torch import Tensor
from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel

from lowmem_core.tiny import tiny_umt5_config, write_tiny_umt5
from lowmem_core.weights import Checkpoint

Written = Callable[[str, torch.dtype], Path]
LENGTH = 24


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Return a function that writes a tiny encoder once and gives its path."""

    @cache
    def write(kind: str, dtype: torch.dtype) -> Path:
        return write_tiny_umt5(tmp_path_factory.mktemp(kind), kind, dtype=dtype)

    return write


def dequantised(path: Path) -> dict[str, Tensor]:
    """Return the weights of a scaled fp8 file in float32, computed as its makers say: values times scale."""
    file = Checkpoint.open(path)
    tensors = {name: file.read(name) for name in file if name.endswith("weight") and "scale_weight" not in name}
    scales = {name: name.removesuffix("weight") + "scale_weight" for name in tensors}
    return {
        name: tensor.float() * (file.read(scales[name]) if scales[name] in file else 1.0)
        for name, tensor in tensors.items()
    }


@pytest.fixture(scope="session")
def pipeline(written: Written) -> Callable[[str, torch.dtype], WanPipeline]:
    """Return a function that gives diffusers' pipeline with the weights of a kind of file."""

    @cache
    def build(kind: str, dtype: torch.dtype) -> WanPipeline:
        folder = written("diffusers", dtype)
        tokenizer = T5TokenizerFast.from_pretrained(folder / "tokenizer")
        if kind == "comfyui_fp8":
            encoder = UMT5EncoderModel(UMT5Config(**tiny_umt5_config().transformers_arguments())).eval()
            encoder.load_state_dict(dequantised(written(kind, dtype)), strict=False)
            encoder = encoder.to(dtype)
        else:
            encoder = UMT5EncoderModel.from_pretrained(folder / "text_encoder", dtype=dtype)
        return WanPipeline(tokenizer=tokenizer, text_encoder=encoder, vae=None, scheduler=None, transformer=None)

    return build


@pytest.fixture(scope="session")
def expected(pipeline: Callable[[str, torch.dtype], WanPipeline]) -> Callable[[str, torch.dtype, str], Tensor]:
    """Return a function that gives what diffusers' pipeline makes of one prompt."""

    def encode(kind: str, dtype: torch.dtype, prompt: str) -> Tensor:
        with torch.no_grad():
            found = pipeline(kind, dtype).encode_prompt(
                prompt, do_classifier_free_guidance=False, max_sequence_length=LENGTH
            )
        return found[0]

    return encode
