"""Wan VAEs load from every form they are published in, with equal tensors."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowmem_core.errors import CheckpointError
from lowmem_core.tiny import tiny_wan_vae_tensors
from lowmem_core.vae import denormalise, load_wan_vae, wan_vae_from_tensors
from lowmem_core.weights import wan_vae_key_map

DATA = Path(__file__).resolve().parent.parent / "data"
KINDS = ("2.1", "2.2")


def assert_holds(vae: torch.nn.Module, originals: dict[str, Tensor]) -> None:
    """Assert that ``vae`` has exactly the values of ``originals``."""
    state = vae.state_dict()
    assert all(torch.equal(state[ours], originals[name]) for name, ours in wan_vae_key_map(vae).items())
    assert len(state) == len(originals)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix", ["", "vae.", "first_stage_model."])
def test_original_files_load(kind: str, prefix: str, tmp_path: Path) -> None:
    """The released names load, also from a checkpoint of a whole pipeline."""
    originals = tiny_wan_vae_tensors(kind)
    others = {"model.diffusion_model.x": torch.ones(1)} if prefix else {}
    save_file({prefix + name: tensor for name, tensor in originals.items()} | others, tmp_path / "v.safetensors")
    vae = load_wan_vae(tmp_path / "v.safetensors")
    assert_holds(vae, originals)
    assert not vae.training
    assert not any(parameter.requires_grad for parameter in vae.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_torch_files_load(kind: str, tmp_path: Path) -> None:
    """``Wan2.1_VAE.pth`` and ``Wan2.2_VAE.pth`` are of this form."""
    torch.save(tiny_wan_vae_tensors(kind), tmp_path / "v.pth")
    assert_holds(load_wan_vae(tmp_path / "v.pth"), tiny_wan_vae_tensors(kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("folder", [".", "vae"])
@pytest.mark.parametrize("shard", ["10GB", "200KB"])
def test_diffusers_folders_load(kind: str, folder: str, shard: str, tmp_path: Path) -> None:
    """What diffusers saves is read back, whole or sharded, also inside a pipeline's folder."""
    originals = tiny_wan_vae_tensors(kind)
    wan_vae_from_tensors(originals).save_pretrained(tmp_path / folder, max_shard_size=shard)
    assert_holds(load_wan_vae(tmp_path), originals)


def test_a_folder_keeps_its_own_statistics(tmp_path: Path) -> None:
    """A fine-tuned VAE may have other means."""
    vae = wan_vae_from_tensors(tiny_wan_vae_tensors("2.1"))
    vae.register_to_config(latents_mean=[0.5] * 16, latents_std=[2.0] * 16)
    vae.save_pretrained(tmp_path)
    assert load_wan_vae(tmp_path).config.latents_mean == [0.5] * 16


@pytest.mark.parametrize("kind", KINDS)
def test_the_hosts_tensors_are_shared(kind: str) -> None:
    """ComfyUI's own VAE is used without a second copy of its weights."""
    originals = tiny_wan_vae_tensors(kind)
    vae = wan_vae_from_tensors(originals)
    state = vae.state_dict()
    assert all(state[ours].data_ptr() == originals[name].data_ptr() for name, ours in wan_vae_key_map(vae).items())


def test_weights_are_converted_when_asked() -> None:
    """A half-precision decode needs half-precision weights."""
    vae = wan_vae_from_tensors(tiny_wan_vae_tensors("2.1"), torch.bfloat16)
    assert {parameter.dtype for parameter in vae.parameters()} == {torch.bfloat16}


def test_a_missing_tensor_is_named_in_both_tongues() -> None:
    """The file's name for it and ours."""
    originals = tiny_wan_vae_tensors("2.1")
    del originals["decoder.upsamples.0.residual.2.bias"]
    with pytest.raises(CheckpointError, match=r"decoder\.upsamples\.0\.residual\.2\.bias \(decoder\.up_blocks\.0"):
        wan_vae_from_tensors(originals)


def test_another_model_is_refused() -> None:
    """An SD VAE is not a Wan VAE."""
    with pytest.raises(CheckpointError, match="holds no Wan VAE"):
        wan_vae_from_tensors({"decoder.up.0.block.0.conv1.weight": torch.ones(1)})


@pytest.fixture(scope="module")
def lance_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the VAE of the Lance reference: bf16, original Wan 2.2 names."""
    path = tmp_path_factory.mktemp("lance") / "vae.safetensors"
    path.write_bytes(gzip.decompress((DATA / "lance_tiny_vae.safetensors.gz").read_bytes()))
    return path


@pytest.mark.parametrize(
    ("variant", "dtype", "tolerance"), [("fp32", torch.float32, 1e-5), ("bf16cpu", torch.bfloat16, 2e-2)]
)
def test_the_decode_of_lances_own_code_is_met(
    variant: str, dtype: torch.dtype, tolerance: float, lance_file: Path
) -> None:
    """Names, structure and statistics are right: pixels match those made by the original code.

    The two implementations order a few operations differently, hence a tolerance of rounding in ``dtype``.
    """
    reference = load_file(DATA / "lance_tiny_decode.safetensors")
    vae = load_wan_vae(lance_file, dtype)
    latents = reference[f"{variant}.final_latent"].permute(3, 0, 1, 2).unsqueeze(0).to(dtype)
    with torch.inference_mode():
        decoded = vae.decode(denormalise(latents, vae)).sample.float().clamp(-1, 1)[0]
    torch.testing.assert_close(decoded, reference[f"{variant}.decoded"], rtol=0, atol=tolerance)
