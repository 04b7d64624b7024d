"""Which files a run uses, and the shelf that keeps them loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lowmem_core.denoise import LoraUse
from lowmem_core.errors import RequestError
from lowmem_core.families.wan.models import ModelShelf, WanFiles
from lowmem_core.tiny import tiny_wan_config, write_tiny_wan


@pytest.fixture
def files(tmp_path: Path) -> WanFiles:
    """Return two tiny transformers."""
    names = ("high.safetensors", "low.safetensors")
    return WanFiles(*(write_tiny_wan(tmp_path, seed=seed, name=name) for seed, name in enumerate(names)))


def test_a_second_run_finds_the_same_modules(files: WanFiles) -> None:
    """Nothing is loaded twice, and looking at sizes uses what is here."""
    shelf = ModelShelf()
    first = shelf.load(files, from_disk=False)
    assert all(one is other for one, other in zip(first, shelf.load(files, from_disk=False), strict=True))
    assert all(one is other for one, other in zip(first, shelf.describe(files), strict=True))


def test_looking_at_sizes_loads_nothing(files: WanFiles) -> None:
    """A description has every tensor still on disk."""
    assert all(one.locations for one in ModelShelf().describe(files))


def test_a_changed_file_is_loaded_again(files: WanFiles, tmp_path: Path) -> None:
    """Replacing a file between two runs is noticed, and the old weights leave."""
    shelf = ModelShelf()
    old = shelf.load(files, from_disk=False)[0].module
    write_tiny_wan(tmp_path, seed=9, name="high.safetensors")
    os.utime(tmp_path / "high.safetensors", ns=(1, 1))
    new = shelf.load(files, from_disk=False)[0].module
    assert new is not old
    assert not torch.equal(next(new.parameters()), next(old.parameters()))


def test_what_could_not_be_put_back_is_loaded_again(files: WanFiles) -> None:
    """A module that is lost leaves the shelf."""
    shelf = ModelShelf()
    lost = shelf.load(files, from_disk=False)
    shelf.invalidator(lost)()
    assert shelf.load(files, from_disk=False)[0] is not lost[0]


def test_the_least_recently_used_leaves(files: WanFiles) -> None:
    """Host memory holds as many as were asked for."""
    shelf = ModelShelf(capacity=1)
    first = shelf.load(files, from_disk=False)
    assert shelf.load(files, from_disk=False)[0] is not first[0]


def test_each_kind_has_its_boundary(files: WanFiles) -> None:
    """0.875 for text, 0.9 for images, none for one transformer, and a wish goes before."""
    text, image = tiny_wan_config("t2v"), tiny_wan_config("i2v")
    assert (files.boundary(text), files.boundary(image)) == (0.875, 0.9)
    assert WanFiles(files.high_noise).boundary(text) is None
    assert WanFiles(files.high_noise, files.low_noise, boundary_ratio=0.5).boundary(text) == 0.5


def test_a_lora_for_a_transformer_that_is_not_there_is_refused(files: WanFiles) -> None:
    """A LoRA that would do nothing is an error."""
    with pytest.raises(RequestError, match="there is no transformer for x"):
        WanFiles(files.high_noise, loras=(LoraUse(Path("x"), 1.0, 1),))
