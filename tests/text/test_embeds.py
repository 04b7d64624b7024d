"""Embeds in files are read as they were written, or refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lowmem_core.errors import RequestError, WriteError
from lowmem_core.text import Embeds, read_embeds, write_embeds

PROMPT = torch.arange(24.0).view(1, 6, 4)


def written(folder: Path, **tensors: torch.Tensor) -> Path:
    """Write ``tensors`` as a file of embeds."""
    save_file(tensors, folder / "e.safetensors")
    return folder / "e.safetensors"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_written_is_read(dtype: torch.dtype, tmp_path: Path) -> None:
    """Every tensor comes back with its bits and dtype; the folder is made."""
    embeds = Embeds(PROMPT.to(dtype), -PROMPT.to(dtype), PROMPT.to(dtype).repeat(2, 1, 1))
    found = read_embeds(write_embeds(tmp_path / "new" / "e.safetensors", embeds))
    assert found.prompt_embeds.dtype == dtype
    assert torch.equal(found.prompt_embeds, embeds.prompt_embeds)
    assert torch.equal(found.negative_prompt_embeds, embeds.negative_prompt_embeds)
    assert torch.equal(found.image_embeds, embeds.image_embeds)


def test_only_the_prompt_is_needed(tmp_path: Path) -> None:
    """Without guidance and without images there is nothing else."""
    found = read_embeds(write_embeds(tmp_path / "e.safetensors", Embeds(PROMPT)))
    assert found.negative_prompt_embeds is None
    assert found.image_embeds is None


def test_one_tensor_may_stand_for_both(tmp_path: Path) -> None:
    """The format refuses tensors that share memory, so each is written apart."""
    found = read_embeds(write_embeds(tmp_path / "e.safetensors", Embeds(PROMPT, PROMPT)))
    assert torch.equal(found.negative_prompt_embeds, PROMPT)


def test_embeds_outlive_their_file(tmp_path: Path) -> None:
    """A file that is replaced while its embeds are used does not change them."""
    path = write_embeds(tmp_path / "e.safetensors", Embeds(PROMPT))
    found = read_embeds(path)
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(found.prompt_embeds, PROMPT)


def test_a_file_without_a_prompt_is_refused(tmp_path: Path) -> None:
    """The message says what is needed and what there is."""
    with pytest.raises(RequestError, match=r"need a tensor 'prompt_embeds'.*have other"):
        read_embeds(written(tmp_path, other=PROMPT))


@pytest.mark.parametrize(
    "wrong",
    [PROMPT[0], PROMPT[None], PROMPT.repeat(2, 1, 1), PROMPT[:, :0], PROMPT.int(), PROMPT.to(torch.float8_e4m3fn)],
    ids=["rank 2", "rank 4", "two prompts", "empty", "integer", "fp8"],
)
@pytest.mark.parametrize("name", ["prompt_embeds", "negative_prompt_embeds"])
def test_what_is_no_embeds_is_refused(wrong: torch.Tensor, name: str, tmp_path: Path) -> None:
    """The message names the tensor, and what it should be like."""
    tensors = {"prompt_embeds": PROMPT} | {name: wrong.clone().contiguous()}
    with pytest.raises(RequestError, match=rf"'{name}' of .*need \[1, tokens, width\]"):
        read_embeds(written(tmp_path, **tensors))


def test_three_images_are_refused(tmp_path: Path) -> None:
    """A first and a last frame are all that a model takes."""
    with pytest.raises(RequestError, match=r"need \[1 or 2, tokens, width\]"):
        read_embeds(written(tmp_path, prompt_embeds=PROMPT, image_embeds=PROMPT.repeat(3, 1, 1)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_embeds_that_are_not_finite_are_refused(value: float, tmp_path: Path) -> None:
    """They would make every frame black, hours later."""
    broken = PROMPT.clone()
    broken[0, 1, 2] = value
    with pytest.raises(RequestError, match="1 of 24 are NaN or infinite"):
        read_embeds(written(tmp_path, prompt_embeds=broken))


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    """The message names the tensor that is not whole."""
    path = written(tmp_path, prompt_embeds=PROMPT)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(RequestError, match="cut off: tensor 'prompt_embeds'"):
        read_embeds(path)


@pytest.mark.parametrize("content", [b"", b"not safetensors at all"])
def test_another_file_is_refused(content: bytes, tmp_path: Path) -> None:
    """The message says that it is no safetensors file."""
    path = tmp_path / "e.safetensors"
    path.write_bytes(content)
    with pytest.raises(RequestError, match="not a whole safetensors file"):
        read_embeds(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """The message names the path."""
    with pytest.raises(RequestError, match="there is no file"):
        read_embeds(tmp_path / "none.safetensors")


def test_a_failed_write_leaves_the_former_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk costs the new embeds, not the old ones, and leaves nothing behind."""
    path = write_embeds(tmp_path / "e.safetensors", Embeds(PROMPT))

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(WriteError, match="no space left"):
        write_embeds(path, Embeds(PROMPT + 1))
    assert torch.equal(read_embeds(path).prompt_embeds, PROMPT)
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """The message says which folder was meant."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(WriteError, match="need a folder that can be written to"):
        write_embeds(tmp_path / "file" / "e.safetensors", Embeds(PROMPT))
