"""A request is known by everything that decides its result, and by nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lowmem_core.denoise import Fingerprint, LoraUse, tensor_sha256
from lowmem_core.errors import RequestError


@pytest.fixture
def base(tmp_path: Path) -> dict[str, Any]:
    """Return the parts of a request."""
    for name in ("model", "lora"):
        (tmp_path / name).write_bytes(name.encode())
        os.utime(tmp_path / name, ns=(5, 5))
    return {
        "models": [tmp_path / "model"],
        "settings": {"steps": 4, "shift": 5.0},
        "tensors": {"embeds": torch.ones(2, 3), "image": None},
        "loras": [LoraUse(tmp_path / "lora", 1.0)],
    }


def test_equal_requests_are_one(base: dict[str, Any]) -> None:
    """Order of settings, absent tensors and the name in the list do not count."""
    other = base | {"settings": {"shift": 5.0, "steps": 4}, "tensors": {"embeds": torch.ones(2, 3)}, "what": "cat"}
    assert Fingerprint.of(**base).key == Fingerprint.of(**other).key
    assert Fingerprint.of(**base).key.isalnum()


@pytest.mark.parametrize(
    "change",
    [
        {"settings": {"steps": 5, "shift": 5.0}},
        {"tensors": {"embeds": torch.zeros(2, 3)}},
        {"tensors": {"embeds": torch.ones(3, 2)}},
        {"tensors": {"embeds": torch.ones(2, 3, dtype=torch.bfloat16)}},
        {"tensors": {"noise": torch.ones(2, 3)}},
        {"loras": []},
        {"models": []},
    ],
)
def test_any_other_part_makes_another_request(base: dict[str, Any], change: dict[str, Any]) -> None:
    """Settings, tensors by bytes, type, shape and name, models, LoRAs."""
    assert Fingerprint.of(**base).key != Fingerprint.of(**(base | change)).key


def test_loras_count_with_strength_and_model(base: dict[str, Any], tmp_path: Path) -> None:
    """The same file elsewhere or stronger is another request."""
    uses = [LoraUse(tmp_path / "lora", strength, model) for strength, model in ((1.0, 0), (0.5, 0), (1.0, 1))]
    assert len({Fingerprint.of(**(base | {"loras": [use]})).key for use in uses}) == 3


@pytest.mark.parametrize("how", ["size", "time"])
def test_a_changed_file_makes_another_request(how: str, base: dict[str, Any], tmp_path: Path) -> None:
    """A state made with the old weights must not go on with the new ones."""
    before = Fingerprint.of(**base).key
    if how == "size":
        (tmp_path / "model").write_bytes(b"longer than before")
    os.utime(tmp_path / "model", ns=(5, 5 if how == "size" else 6))
    assert Fingerprint.of(**base).key != before


def test_a_folder_counts_with_all_its_files(base: dict[str, Any], tmp_path: Path) -> None:
    """A diffusers model is a folder of shards."""
    folder = tmp_path / "transformer"
    folder.mkdir()
    (folder / "a").write_bytes(b"a")
    before = Fingerprint.of(**(base | {"models": [folder]})).key
    (folder / "b").write_bytes(b"b")
    assert Fingerprint.of(**(base | {"models": [folder]})).key != before


@pytest.mark.parametrize("change", [{"models": [Path("missing")]}, {"settings": {"a": object()}}])
def test_what_cannot_be_fingerprinted_is_refused(base: dict[str, Any], change: dict[str, Any]) -> None:
    """Guessing would let another request pick the run up."""
    with pytest.raises(RequestError):
        Fingerprint.of(**(base | change))


def test_a_tensor_is_known_by_its_values_not_its_strides() -> None:
    """A view and its copy are the same input."""
    tensor = torch.arange(6.0).view(2, 3)
    assert tensor_sha256(tensor.t()) == tensor_sha256(tensor.t().contiguous()) != tensor_sha256(tensor)
