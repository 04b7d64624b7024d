"""What a Wan transformer is built like, read from tensor shapes alone.

Nothing is looked up by file name: guessing a configuration by size is wrong for Wan 2.2's image models and TI2V.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from ...errors import CheckpointError

HEAD_DIM = 128
_BLOCK = "blocks."
_FOREIGN = {
    "vace_": "VACE",
    "control_adapter": "Fun Control Camera",
    "ref_conv": "Fun Control with a reference",
    "face_adapter": "Animate",
    "pose_patch_embedding": "Animate",
    "casual_audio_encoder": "S2V",
    "audio_injector": "S2V",
    "motion_encoder": "Animate",
}


@dataclass(frozen=True)
class WanConfig:
    """The numbers that fix the structure of a Wan transformer; names are those of diffusers."""

    patch_size: tuple[int, int, int]
    num_attention_heads: int
    attention_head_dim: int
    in_channels: int
    out_channels: int
    text_dim: int
    freq_dim: int
    ffn_dim: int
    num_layers: int
    cross_attn_norm: bool = True
    image_dim: int | None = None
    added_kv_proj_dim: int | None = None
    pos_embed_seq_len: int | None = None

    @property
    def inner_dim(self) -> int:
        """Width of a token."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def condition_channels(self) -> int:
        """Channels that are given beside the latents: 0, or the mask and the latents of an image."""
        return self.in_channels - self.out_channels

    @property
    def has_timestep_per_token(self) -> bool:
        """Whether each token gets its own timestep (TI2V, which alone has 48 latent channels)."""
        return self.out_channels == 48

    def diffusers_arguments(self) -> dict[str, Any]:
        """Return the arguments of ``WanTransformer3DModel``."""
        return asdict(self)

    def __str__(self) -> str:
        kind = "image and text to video" if self.condition_channels or self.has_timestep_per_token else "text to video"
        return f"Wan {kind}, width {self.inner_dim}, {self.num_layers} blocks, {self.in_channels} input channels"

    @classmethod
    def of_shapes(cls, shapes: Mapping[str, tuple[int, ...]], source: str, head_dim: int = HEAD_DIM) -> WanConfig:
        """Read the configuration.

        Args:
            shapes: Shape of every tensor under diffusers' names, without prefix.
            source: What to call the checkpoint in an error.
            head_dim: Width of an attention head, which no shape tells; every released model has 128.

        Raises:
            CheckpointError: The tensors are those of another model, or one that is needed is missing.
        """
        _check_kind(shapes, source)
        patch = _shape(shapes, "patch_embedding.weight", 5, source)
        inner, patch_size = patch[0], (patch[2], patch[3], patch[4])
        if inner % head_dim:
            raise CheckpointError(
                f"cannot tell how many attention heads {source} has",
                need=f"a width that is a multiple of {head_dim}, or a diffusers folder with a config.json",
                have=f"width {inner}",
            )
        image_norm = shapes.get("condition_embedder.image_embedder.norm1.weight")
        image_positions = shapes.get("condition_embedder.image_embedder.pos_embed")
        added = shapes.get("blocks.0.attn2.add_k_proj.weight")
        return cls(
            patch_size=patch_size,
            num_attention_heads=inner // head_dim,
            attention_head_dim=head_dim,
            in_channels=patch[1],
            out_channels=_shape(shapes, "proj_out.weight", 2, source)[0] // prod(patch_size),
            text_dim=_shape(shapes, "condition_embedder.text_embedder.linear_1.weight", 2, source)[1],
            freq_dim=_shape(shapes, "condition_embedder.time_embedder.linear_1.weight", 2, source)[1],
            ffn_dim=_shape(shapes, "blocks.0.ffn.net.0.proj.weight", 2, source)[0],
            num_layers=1 + max(int(name.split(".")[1]) for name in shapes if name.startswith(_BLOCK)),
            cross_attn_norm="blocks.0.norm2.weight" in shapes,
            image_dim=None if image_norm is None else image_norm[0],
            added_kv_proj_dim=None if added is None else added[1],
            pos_embed_seq_len=None if image_positions is None else image_positions[1],
        )


def _check_kind(shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Raise for variants of Wan that need more than these models are given."""
    for name in shapes:
        for beginning, kind in _FOREIGN.items():
            if name.startswith(beginning):
                raise CheckpointError(
                    f"{source} is a Wan {kind} model, which is not supported",
                    need="a Wan text-to-video, image-to-video or TI2V model",
                    have=f"tensor {name!r}",
                )


def _shape(shapes: Mapping[str, tuple[int, ...]], name: str, ndim: int, source: str) -> tuple[int, ...]:
    """Return the shape of tensor ``name``, which has ``ndim`` dimensions."""
    if len(shapes.get(name, ())) != ndim:
        raise CheckpointError(
            f"{source} is not a whole Wan transformer",
            need=f"tensor {name!r} (in diffusers' naming) with {ndim} dimensions",
            have=str(list(shapes[name])) if name in shapes else f"none among {len(shapes)} tensors",
            remedy="Use the file of a Wan model from models/diffusion_models, or download it again.",
        )
    return shapes[name]
