"""Tiny VAEs and latents are files that every part of the project, and ComfyUI, can open."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowmem_core.errors import RequestError
from lowmem_core.load import read_latents
from lowmem_core.tiny import write_tiny_latents, write_tiny_wan_vae
from lowmem_core.vae import load_wan_vae, wan_vae_config_of

NAMES = {"2.1": "wan_2.1_vae_tiny.safetensors", "2.2": "wan2.2_vae_tiny.safetensors"}


@pytest.mark.parametrize("kind", NAMES)
def test_a_tiny_pair_decodes_to_a_colourful_unsaturated_moving_picture(kind: str, tmp_path: Path) -> None:
    """The demo should be pleasant to look at, and its pixels should tell a right decode from a wrong one."""
    vae = load_wan_vae(write_tiny_wan_vae(tmp_path, kind))
    latents = read_latents(write_tiny_latents(tmp_path, kind, 5, 64, 96))
    with torch.inference_mode():
        video = vae.decode(latents).sample
    assert video.shape == (1, 3, 5, 64, 96)
    assert (video.abs() >= 1).float().mean() < 0.1
    assert video.std(dim=(0, 2, 3, 4)).min() > 0.05
    assert 0.001 < (video[:, :, 1:] - video[:, :, :-1]).abs().mean() < 0.15


@pytest.mark.parametrize("kind", NAMES)
def test_a_seed_gives_the_same_files(kind: str, tmp_path: Path) -> None:
    """Golden hashes can rest on them."""
    first, second, other = (write_tiny_wan_vae(tmp_path / str(n), kind, n // 2) for n in range(3))
    assert first.name == NAMES[kind]
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()


@pytest.mark.parametrize("kind", NAMES)
def test_a_tiny_vae_has_the_released_structure(kind: str, tmp_path: Path) -> None:
    """Only the width is another, and the file is small."""
    path = write_tiny_wan_vae(tmp_path, kind)
    config = wan_vae_config_of(load_wan_vae(path))
    assert (config.z_dim, config.spatial_scale, config.is_residual) == (
        (16, 8, False) if kind == "2.1" else (48, 16, True)
    )
    assert config.base_dim <= 16
    assert path.stat().st_size < 5_000_000


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [("2.1", (12, 64, 96), r"1 \+ 4 k"), ("2.2", (5, 72, 96), "multiples of 16"), ("3", (5, 64, 96), r"2\.1 or 2\.2")],
)
def test_sizes_and_kinds_that_cannot_be_are_refused(
    kind: str, size: tuple[int, int, int], message: str, tmp_path: Path
) -> None:
    """The message says what would do."""
    with pytest.raises(RequestError, match=message):
        write_tiny_latents(tmp_path, kind, *size)
