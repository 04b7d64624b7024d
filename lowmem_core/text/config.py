"""What a UMT5 encoder is built like, read from tensor shapes; a config.json may add what shapes cannot tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import CheckpointError

_ATTENTION = "encoder.block.{}.layer.0.SelfAttention."
_FEED_FORWARD = "encoder.block.0.layer.1.DenseReluDense."
_BLOCK = "encoder.block."
_REMEDY = "Use the UMT5 text encoder of Wan, for example umt5_xxl_fp16.safetensors, or download it again."


@dataclass(frozen=True)
class Umt5Config:
    """The numbers that fix the structure of a UMT5 encoder; names are those of transformers."""

    vocab_size: int
    d_model: int
    d_kv: int
    d_ff: int
    num_layers: int
    num_heads: int
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6

    def transformers_arguments(self) -> dict[str, Any]:
        """Return the arguments of ``UMT5Config``."""
        return asdict(self)

    def __str__(self) -> str:
        return f"UMT5 encoder, width {self.d_model}, {self.num_layers} blocks, {self.vocab_size} tokens"

    @classmethod
    def of_shapes(
        cls, shapes: Mapping[str, tuple[int, ...]], source: str, settings: Mapping[str, Any] | None = None
    ) -> Umt5Config:
        """Read the configuration.

        Args:
            shapes: Shape of every tensor under transformers' names.
            source: What to call the checkpoint in an error.
            settings: The ``config.json`` beside the tensors, if there is one.

        Raises:
            CheckpointError: The tensors are those of another model, or one that is needed is missing.
        """
        _check_kind(shapes, source)
        settings = settings or {}
        vocab_size, d_model = _shape(shapes, "shared.weight", source)
        buckets, heads = _shape(shapes, _ATTENTION.format(0) + "relative_attention_bias.weight", source)
        inner = _shape(shapes, _ATTENTION.format(0) + "q.weight", source)[0]
        if not heads or inner % heads:
            raise CheckpointError(
                f"{source} is not a UMT5 encoder", need=f"a multiple of {heads} heads", have=f"width {inner}"
            )
        return cls(
            vocab_size=vocab_size,
            d_model=d_model,
            d_kv=inner // heads,
            d_ff=_shape(shapes, _FEED_FORWARD + "wi_0.weight", source)[0],
            num_layers=_layers(shapes),
            num_heads=heads,
            relative_attention_num_buckets=buckets,
            relative_attention_max_distance=int(settings.get("relative_attention_max_distance", 128)),
            layer_norm_epsilon=float(settings.get("layer_norm_epsilon", 1e-6)),
        )


def _layers(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of blocks."""
    indices = [name.removeprefix(_BLOCK).split(".")[0] for name in shapes if name.startswith(_BLOCK)]
    return 1 + max(int(index) for index in indices if index.isdecimal())


def _check_kind(shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Raise for encoders that look alike: T5 has one position table for all blocks, older ones no gate."""
    second = _ATTENTION.format(1)
    if second + "q.weight" in shapes and second + "relative_attention_bias.weight" not in shapes:
        raise CheckpointError(
            f"{source} is a T5 encoder, not UMT5",
            need="a relative_attention_bias in every block",
            have="one in the first block at most",
            remedy=_REMEDY,
        )
    if _FEED_FORWARD + "wi.weight" in shapes:
        raise CheckpointError(
            f"{source} is not a UMT5 encoder", need="gated layers, wi_0 and wi_1", have="plain ones, wi", remedy=_REMEDY
        )


def _shape(shapes: Mapping[str, tuple[int, ...]], name: str, source: str) -> tuple[int, ...]:
    """Return the shape of the matrix ``name``."""
    if len(shapes.get(name, ())) != 2:
        raise CheckpointError(
            f"{source} is not a whole UMT5 encoder",
            need=f"tensor {name!r} (in transformers' naming) with 2 dimensions",
            have=str(list(shapes[name])) if name in shapes else f"none among {len(shapes)} tensors",
            remedy=_REMEDY,
        )
    return shapes[name]
