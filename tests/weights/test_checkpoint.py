"""Checkpoints of every form are read by their headers, and damage is reported by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lowmem_core.errors import CheckpointError
from lowmem_core.weights import Checkpoint, TensorInfo

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "b.bias": torch.ones(4, dtype=torch.bfloat16)}
INFOS = {"a.weight": TensorInfo((2, 3), "F32"), "b.bias": TensorInfo((4,), "BF16")}


def write_folder(folder: Path) -> Path:
    """Write a sharded diffusers folder."""
    save_file({"a.weight": TENSORS["a.weight"]}, folder / "x-1.safetensors")
    save_file({"b.bias": TENSORS["b.bias"]}, folder / "x-2.safetensors")
    weight_map = {"a.weight": "x-1.safetensors", "b.bias": "x-2.safetensors"}
    (folder / "x.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text('{"z_dim": 16}')
    return folder


def write(form: str, folder: Path) -> Path:
    """Write TENSORS in ``form`` and return the path to open."""
    if form == "sharded":
        return write_folder(folder)
    path = folder / f"model.{form.removeprefix('nested ').removeprefix('legacy ')}"
    if form == "safetensors":
        save_file(TENSORS, path)
    elif form.startswith("nested"):
        torch.save({"state_dict": TENSORS, "step": 3}, path)
    else:
        torch.save(TENSORS, path, _use_new_zipfile_serialization=not form.startswith("legacy"))
    return path


@pytest.mark.parametrize("form", ["safetensors", "pth", "nested pt", "legacy pth", "sharded"])
def test_every_form_gives_the_same_names_and_tensors(form: str, tmp_path: Path) -> None:
    """A user may keep weights in any published form."""
    checkpoint = Checkpoint.open(write(form, tmp_path))
    assert dict(checkpoint) == INFOS
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in TENSORS.items())


def test_a_folder_gives_its_config(tmp_path: Path) -> None:
    """What config.json says travels with the tensors."""
    assert Checkpoint.open(write_folder(tmp_path)).config == {"z_dim": 16}


def test_a_mapping_is_not_copied() -> None:
    """The host's own tensors are shared."""
    checkpoint = Checkpoint.of_tensors(TENSORS, "host")
    assert checkpoint.read("a.weight") is TENSORS["a.weight"]


def test_sizes_are_known_without_reading() -> None:
    """Bytes follow from shape and dtype."""
    assert [info.nbytes for info in INFOS.values()] == [24, 8]


def test_a_cut_off_file_names_itself_and_the_tensor(tmp_path: Path) -> None:
    """A broken download is told by file and first incomplete tensor."""
    path = write("safetensors", tmp_path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is cut off: tensor '(a.weight|b.bias)'"):
        Checkpoint.open(path)


@pytest.mark.parametrize(
    "content", [b"", b"abc", b"\xff" * 64, b"\x08" + b"\0" * 7 + b"not json", b"\x02" + b"\0" * 7 + b"[]"]
)
@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_garbage_is_refused_by_name(content: bytes, suffix: str, tmp_path: Path) -> None:
    """An HTML error page saved as a model must not end in a stack trace of another library."""
    path = tmp_path / f"junk.{suffix}"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"junk.{suffix}"):
        Checkpoint.open(path)


def test_a_header_whose_sizes_disagree_is_refused(tmp_path: Path) -> None:
    """Offsets that do not match shape and dtype name the tensor."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match="tensor 'w'"):
        Checkpoint.open(tmp_path / "m.safetensors")


def test_a_truncated_torch_file_is_refused(tmp_path: Path) -> None:
    """Half a PyTorch file is damage, too."""
    path = write("pth", tmp_path)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(CheckpointError, match=r"model\.pth"):
        Checkpoint.open(path)


def test_a_torch_file_with_code_is_refused(tmp_path: Path) -> None:
    """No code of a downloaded file is run."""
    torch.save({"w": Path("x")}, tmp_path / "m.pth")
    with pytest.raises(CheckpointError, match=r"m\.pth"):
        Checkpoint.open(tmp_path / "m.pth")


def test_a_torch_file_without_tensors_is_refused(tmp_path: Path) -> None:
    """Something that is not a state dict is named."""
    torch.save({"w": 3}, tmp_path / "m.pth")
    with pytest.raises(CheckpointError, match="int under 'w'"):
        Checkpoint.open(tmp_path / "m.pth")


@pytest.mark.parametrize("name", ["none.safetensors", "none.pth"])
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    """A wrong path is told as such."""
    with pytest.raises(CheckpointError, match=name):
        Checkpoint.open(tmp_path / name)


def test_an_unknown_suffix_is_refused(tmp_path: Path) -> None:
    """The form is told by the suffix."""
    (tmp_path / "m.onnx").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"\.onnx"):
        Checkpoint.open(tmp_path / "m.onnx")


def test_a_missing_shard_names_a_tensor_in_it(tmp_path: Path) -> None:
    """One shard of a download may be lacking."""
    (write_folder(tmp_path) / "x-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"x-2\.safetensors is missing; need it holds tensor 'b.bias'"):
        Checkpoint.open(tmp_path)


def test_an_index_cannot_reach_outside_its_folder(tmp_path: Path) -> None:
    """A downloaded index names files beside it only."""
    write_folder(tmp_path)
    (tmp_path / "x.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}')
    with pytest.raises(CheckpointError, match="outside its folder"):
        Checkpoint.open(tmp_path)


def test_a_tensor_that_is_not_in_its_shard_is_named(tmp_path: Path) -> None:
    """Index and shard must agree."""
    write_folder(tmp_path)
    (tmp_path / "x.safetensors.index.json").write_text('{"weight_map": {"c": "x-1.safetensors"}}')
    with pytest.raises(CheckpointError, match="tensor 'c' is not in"):
        Checkpoint.open(tmp_path)


def test_two_sets_of_weights_in_a_folder_are_ambiguous(tmp_path: Path) -> None:
    """We do not guess between variants."""
    for name in ("a", "b"):
        save_file(TENSORS, tmp_path / f"{name}.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"a\.safetensors, b\.safetensors"):
        Checkpoint.open(tmp_path)


def test_an_unknown_tensor_is_named() -> None:
    """Asking for what is not there is a CheckpointError, not a KeyError."""
    with pytest.raises(CheckpointError, match="no tensor 'z'"):
        Checkpoint.of_tensors(TENSORS, "host").read("z")


def test_a_file_that_vanished_is_reported(tmp_path: Path) -> None:
    """Headers are read first and bytes later; in between a drive may go."""
    checkpoint = Checkpoint.open(write("safetensors", tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        checkpoint.read("b.bias")
