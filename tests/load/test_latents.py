"""Saved latents are read as ComfyUI reads them, or refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lowmem_core.errors import RequestError
from lowmem_core.load import read_latents

LATENTS = torch.arange(48.0).view(1, 2, 2, 3, 4)


def written(folder: Path, **tensors: torch.Tensor) -> Path:
    """Write ``tensors`` as a latent file."""
    save_file(tensors, folder / "x.latent")
    return folder / "x.latent"


@pytest.mark.parametrize("key", ["latents", "samples", "anything"])
def test_plain_files_are_read_as_they_are(key: str, tmp_path: Path) -> None:
    """One tensor in a file is the latents, whatever its name."""
    assert torch.equal(read_latents(written(tmp_path, **{key: LATENTS})), LATENTS)


def test_a_comfyui_latent_is_read_as_it_is(tmp_path: Path) -> None:
    """Current ComfyUI marks its files and does not scale."""
    path = written(tmp_path, latent_tensor=LATENTS, latent_format_version_0=torch.tensor([]))
    assert torch.equal(read_latents(path), LATENTS)


def test_an_unmarked_comfyui_latent_is_scaled_back(tmp_path: Path) -> None:
    """Old ComfyUI saved latents scaled by 0.18215."""
    assert torch.equal(read_latents(written(tmp_path, latent_tensor=LATENTS)), LATENTS * (1.0 / 0.18215))


def test_half_precision_latents_become_float32(tmp_path: Path) -> None:
    """The decode chooses its own dtype later."""
    assert read_latents(written(tmp_path, latents=LATENTS.half())).dtype == torch.float32


@pytest.mark.parametrize(
    "tensors",
    [
        {"latents": torch.ones(1, 4, 8, 8)},
        {"latents": torch.ones(1, 16, 0, 8, 8)},
        {"latents": torch.ones(1, 2, 2, 3, 4, dtype=torch.int32)},
        {"a": LATENTS, "b": LATENTS + 1},
    ],
    ids=["image", "empty", "integer", "ambiguous"],
)
def test_what_is_no_video_latent_is_refused(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """The message names the file."""
    with pytest.raises(RequestError, match=r"x\.latent"):
        read_latents(written(tmp_path, **tensors))


@pytest.mark.parametrize("content", [None, b"junk"])
def test_missing_and_damaged_files_are_refused(content: bytes | None, tmp_path: Path) -> None:
    """A latent file is an input, so its damage is a RequestError."""
    if content is not None:
        (tmp_path / "x.latent").write_bytes(content)
    with pytest.raises(RequestError, match=r"x\.latent"):
        read_latents(tmp_path / "x.latent")
