"""The original names of Wan VAE tensors are derived from the module tree, at every width."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from diffusers import AutoencoderKLWan

from lowmem_core.load import build_skeleton
from lowmem_core.weights import wan_vae_key_map

REAL = {
    "2.1": {},
    "2.2": {
        "base_dim": 160,
        "decoder_base_dim": 256,
        "z_dim": 48,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "is_residual": True,
        "scale_factor_spatial": 16,
    },
}
COUNTS = {"2.1": 194, "2.2": 196}
COMFY_NAMES = """
import json, sys
import comfy.cli_args
comfy.cli_args.args.cpu = True
import torch
from comfy.ldm.wan import vae, vae2_2
common = {"dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "temperal_downsample": [False, True, True]}
with torch.device("meta"):
    models = {"2.1": vae.WanVAE(dim=96, z_dim=16, **common), "2.2": vae2_2.WanVAE(dim=160, z_dim=48, **common)}
found = {kind: {n: list(t.shape) for n, t in m.state_dict().items()} for kind, m in models.items()}
print("NAMES" + json.dumps(found))
"""


def comfy_folder() -> Path | None:
    """Return the ComfyUI checkout to compare with, if there is one."""
    folder = Path(os.environ.get("COMFYUI_PATH", Path.home() / "comfy" / "ComfyUI"))
    return folder if (folder / "comfy" / "ldm" / "wan" / "vae2_2.py").is_file() else None


@pytest.mark.parametrize("kind", ["2.1", "2.2"])
def test_the_map_of_the_real_vae_is_one_to_one(kind: str) -> None:
    """Every tensor of the released VAE has one original name: 194 in 2.1, 196 in 2.2."""
    vae = build_skeleton(AutoencoderKLWan, REAL[kind])
    names = wan_vae_key_map(vae)
    assert len(names) == COUNTS[kind]
    assert sorted(names.values()) == sorted(vae.state_dict())


@pytest.mark.parametrize(
    ("kind", "original", "ours"),
    [
        ("2.1", "encoder.downsamples.2.resample.1.weight", "encoder.down_blocks.2.resample.1.weight"),
        ("2.1", "decoder.upsamples.7.time_conv.bias", "decoder.up_blocks.1.upsamplers.0.time_conv.bias"),
        ("2.1", "decoder.upsamples.4.shortcut.weight", "decoder.up_blocks.1.resnets.0.conv_shortcut.weight"),
        (
            "2.2",
            "encoder.downsamples.1.downsamples.2.time_conv.bias",
            "encoder.down_blocks.1.downsampler.time_conv.bias",
        ),
        ("2.2", "decoder.upsamples.3.upsamples.2.residual.6.bias", "decoder.up_blocks.3.resnets.2.conv2.bias"),
        ("2.2", "decoder.middle.1.to_qkv.bias", "decoder.mid_block.attentions.0.to_qkv.bias"),
    ],
)
def test_names_follow_running_order(kind: str, original: str, ours: str) -> None:
    """Wan 2.1 numbers layers flat, Wan 2.2 within each level."""
    assert wan_vae_key_map(build_skeleton(AutoencoderKLWan, REAL[kind]))[original] == ours


@pytest.mark.host
@pytest.mark.parametrize("kind", ["2.1", "2.2"])
def test_names_and_shapes_are_those_of_comfyui(kind: str) -> None:
    """ComfyUI's modules have exactly the tensors that the map lists."""
    folder = comfy_folder()
    if folder is None:
        pytest.skip("needs a ComfyUI checkout with Wan 2.2 at COMFYUI_PATH")
    environment = {**os.environ, "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [sys.executable, "-c", COMFY_NAMES], env=environment, cwd=folder, capture_output=True, text=True
    )
    if "ModuleNotFoundError" in ran.stderr:
        pytest.skip(f"ComfyUI cannot be imported here: {ran.stderr.strip().splitlines()[-1]}")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.partition("NAMES")[2])[kind]
    vae = build_skeleton(AutoencoderKLWan, REAL[kind])
    shapes = {name: list(tensor.shape) for name, tensor in vae.state_dict().items()}
    assert {original: shapes[ours] for original, ours in wan_vae_key_map(vae).items()} == found
