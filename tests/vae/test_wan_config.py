"""The structure of a Wan VAE is read from tensor shapes alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from diffusers import AutoencoderKLWan
from torch import nn

from lowmem_core.errors import CheckpointError
from lowmem_core.load import build_skeleton
from lowmem_core.vae import WanVaeConfig, wan_vae_config_of
from lowmem_core.weights import wan_vae_key_map

WAN_21 = WanVaeConfig(96, 96, 16, (1, 2, 4, 4), 2, (False, True, True), False, 1, 3, 3)
WAN_22 = WanVaeConfig(160, 256, 48, (1, 2, 4, 4), 2, (False, True, True), True, 2, 12, 12)
CONFIGS = {
    "2.1": WAN_21,
    "2.2": WAN_22,
    "alpha": dataclasses.replace(WAN_21, in_channels=4, out_channels=4),
    "tiny": dataclasses.replace(WAN_22, base_dim=8, decoder_base_dim=16),
    "shallow": dataclasses.replace(WAN_21, num_res_blocks=1, dim_mult=(1, 1, 2), temporal_downsample=(True, True)),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("original", [True, False], ids=["original", "diffusers"])
def test_shapes_tell_the_configuration(name: str, original: bool) -> None:
    """Under both kinds of names, at real and tiny widths."""
    vae = build_skeleton(AutoencoderKLWan, CONFIGS[name].diffusers_arguments())
    shapes = {key: tuple(tensor.shape) for key, tensor in vae.state_dict().items()}
    if original:
        shapes = {theirs: shapes[ours] for theirs, ours in wan_vae_key_map(vae).items()}
    assert WanVaeConfig.of_shapes(shapes, "test") == CONFIGS[name]


def test_a_built_vae_tells_its_configuration() -> None:
    """Planning needs no file."""
    assert wan_vae_config_of(build_skeleton(AutoencoderKLWan, {})) == WAN_21


@pytest.mark.parametrize(("config", "scale"), [(WAN_21, 8), (WAN_22, 16)])
def test_scales_follow_from_levels_and_patch(config: WanVaeConfig, scale: int) -> None:
    """Wan 2.1 enlarges 8 times, Wan 2.2 16 times; both quadruple time; both give colour pictures."""
    assert (config.spatial_scale, config.temporal_scale, config.image_channels) == (scale, 4, 3)


def test_another_model_is_refused() -> None:
    """The message says which tensor was looked for."""
    with pytest.raises(CheckpointError, match=r"encoder\.conv1\.weight"):
        wan_vae_config_of(nn.Linear(2, 2))


def test_uneven_levels_are_refused() -> None:
    """A VAE of another structure is not squeezed into ours."""
    shapes = {name: tuple(t.shape) for name, t in build_skeleton(AutoencoderKLWan, {}).state_dict().items()}
    shapes = {name: shape for name, shape in shapes.items() if not name.startswith("encoder.down_blocks.1.")}
    with pytest.raises(CheckpointError, match="not built like a Wan VAE"):
        WanVaeConfig.of_shapes(shapes, "test")


def test_no_memory_is_used_to_build_the_real_vae() -> None:
    """Real widths are only ever described in tests."""
    vae = build_skeleton(AutoencoderKLWan, WAN_22.diffusers_arguments())
    assert sum(p.numel() for p in vae.parameters()) == 704_688_668
    assert all(p.device == torch.device("meta") for p in vae.parameters())
