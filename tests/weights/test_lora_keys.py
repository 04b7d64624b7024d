"""LoRA keys in every naming lead to the layer they change, and all others are told apart."""

from __future__ import annotations

import pytest

from lowmem_core.errors import CheckpointError
from lowmem_core.weights import wan_original_name
from lowmem_core.weights.lora_keys import (
    ALPHA,
    BIAS,
    DIFF,
    DOWN,
    MAGNITUDE,
    UP,
    LoraKeys,
    match_lora_keys,
)

LAYERS = (
    "blocks.0.attn1.to_q",
    "blocks.0.attn2.add_k_proj",
    "blocks.12.ffn.net.0.proj",
    "blocks.0.norm2",
    "blocks.0.scale_shift_table",
    "scale_shift_table",
    "condition_embedder.time_proj",
    "patch_embedding",
)


def matched(*keys: str) -> LoraKeys:
    """Match keys with a few layers of a Wan model."""
    return match_lora_keys(keys, LAYERS, wan_original_name)


@pytest.mark.parametrize(
    ("key", "layer", "role"),
    [
        ("diffusion_model.blocks.0.self_attn.q.lora_A.weight", "blocks.0.attn1.to_q", DOWN),
        ("diffusion_model.blocks.0.self_attn.q.lora_B.default.weight", "blocks.0.attn1.to_q", UP),
        ("diffusion_model.blocks.12.ffn.0.lora_down.weight", "blocks.12.ffn.net.0.proj", DOWN),
        ("diffusion_model.blocks.12.ffn.0.lora_up.weight", "blocks.12.ffn.net.0.proj", UP),
        ("diffusion_model.blocks.12.ffn.0.alpha", "blocks.12.ffn.net.0.proj", ALPHA),
        ("diffusion_model.blocks.12.ffn.0.diff_b", "blocks.12.ffn.net.0.proj", BIAS),
        ("model.diffusion_model.patch_embedding.diff", "patch_embedding", DIFF),
        ("transformer.blocks.0.attn1.to_q.lora_A.weight", "blocks.0.attn1.to_q", DOWN),
        ("transformer.blocks.0.attn1.to_q.lora.up.weight", "blocks.0.attn1.to_q", UP),
        ("base_model.model.blocks.0.self_attn.q.lora_B.weight", "blocks.0.attn1.to_q", UP),
        ("base_model.model.transformer.blocks.0.attn1.to_q.lora_B.bias", "blocks.0.attn1.to_q", BIAS),
        ("blocks.0.cross_attn.k_img.lora_A.weight", "blocks.0.attn2.add_k_proj", DOWN),
        ("lora_unet_blocks_0_self_attn_q.lora_down.weight", "blocks.0.attn1.to_q", DOWN),
        ("lora_unet__blocks_0_cross_attn_k_img.alpha", "blocks.0.attn2.add_k_proj", ALPHA),
        ("lora_unet_blocks_12_ffn_0.lora_up.weight", "blocks.12.ffn.net.0.proj", UP),
        ("lora_unet_blocks_12_ffn_net_0_proj.lora_up.weight", "blocks.12.ffn.net.0.proj", UP),
        ("lora_unet_time_projection_1.lora_up.weight", "condition_embedder.time_proj", UP),
        ("diffusion_model.blocks.0.norm3.diff", "blocks.0.norm2", DIFF),
        ("diffusion_model.blocks.0.modulation.diff", "blocks.0.scale_shift_table", DIFF),
        ("diffusion_model.blocks.0.diff_m", "blocks.0.scale_shift_table", DIFF),
        ("diffusion_model.head.diff_m", "scale_shift_table", DIFF),
        ("blocks.0.self_attn.q.dora_scale", "blocks.0.attn1.to_q", MAGNITUDE),
        ("blocks.0.self_attn.q.lora_magnitude_vector.default.weight", "blocks.0.attn1.to_q", MAGNITUDE),
    ],
)
def test_every_naming_leads_to_its_layer(key: str, layer: str, role: str) -> None:
    """Prefix, original or diffusers' name, dots or underscores: the layer and the role are the same."""
    assert matched(key) == LoraKeys({layer: {role: key}}, ())


@pytest.mark.parametrize(
    "key",
    [
        "diffusion_model.blocks.7.self_attn.q.lora_A.weight",
        "diffusion_model.blocks.0.self_attn.q.lokr_w1",
        "diffusion_model.blocks.0.self_attn.q.weight",
        "lora_te_text_model_encoder_layers_0_mlp_fc1.lora_down.weight",
        "transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight",
        "scaled_fp8",
        "",
    ],
)
def test_what_the_model_lacks_is_foreign(key: str) -> None:
    """Other layers, other kinds of adapters and weights of a model are not taken for something else."""
    assert matched(key) == LoraKeys({}, (key,))


def test_one_layer_cannot_be_changed_twice() -> None:
    """Two spellings of one tensor in a file leave open which of them counts."""
    keys = ("diffusion_model.blocks.0.self_attn.q.alpha", "lora_unet_blocks_0_self_attn_q.alpha")
    with pytest.raises(CheckpointError, match=r"changes one layer twice; have .*blocks\.0\.attn1\.to_q"):
        matched(*keys)
