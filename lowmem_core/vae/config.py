"""What a Wan VAE is built like, read from tensor shapes alone.

Nothing is looked up by file name or width: the released VAEs (2.1 at width 96, 2.2 at 160 and 256), Lance's,
and the tiny ones of the tests are all read by counting residual blocks and resamplers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

_ENDS = {
    "conv_in": ("encoder.conv1.weight", "encoder.conv_in.weight"),
    "latent": ("conv2.weight", "post_quant_conv.weight"),
    "norm_out": ("decoder.head.0.gamma", "decoder.norm_out.gamma"),
    "conv_out": ("decoder.head.2.weight", "decoder.conv_out.weight"),
}
_ENCODER_UNIT = re.compile(
    r"encoder\.(?:downsamples|down_blocks)\.(\d+)"
    r"(\.downsamples\.\d+|\.resnets\.\d+|\.downsampler)?"
    r"\.(residual\.2|conv1|resample\.1|time_conv)\.weight\Z"
)
_FOLDED_CHANNELS = 12


@dataclass(frozen=True)
class WanVaeConfig:
    """The numbers that fix the structure of a Wan VAE.

    Attributes:
        base_dim: Width of the encoder's first level.
        decoder_base_dim: Width of the decoder's last level.
        z_dim: Latent channels: 16 (Wan 2.1) or 48 (Wan 2.2 TI2V).
        dim_mult: Width of each level over ``base_dim``.
        num_res_blocks: Residual blocks per encoder level; the decoder has one more.
        temporal_downsample: For each level but the last, whether the encoder halves time there.
        is_residual: Whether levels have a shortcut of averages (Wan 2.2).
        patch_size: Side of the pixel squares folded into channels: 1 or 2.
        in_channels: Channels into the encoder, after folding.
        out_channels: Channels out of the decoder, before unfolding.
    """

    base_dim: int
    decoder_base_dim: int
    z_dim: int
    dim_mult: tuple[int, ...]
    num_res_blocks: int
    temporal_downsample: tuple[bool, ...]
    is_residual: bool
    patch_size: int
    in_channels: int
    out_channels: int

    @property
    def spatial_scale(self) -> int:
        """How many times each side of a latent is enlarged: 8 or 16."""
        return int(2 ** (len(self.dim_mult) - 1) * self.patch_size)

    @property
    def temporal_scale(self) -> int:
        """How many frames each latent frame after the first stands for: 4."""
        return int(2 ** sum(self.temporal_downsample))

    @property
    def image_channels(self) -> int:
        """Channels of a decoded frame: 3, or 4 with alpha."""
        return self.out_channels // self.patch_size**2

    def diffusers_arguments(self) -> dict[str, Any]:
        """Return the arguments of ``AutoencoderKLWan``, latent statistics excepted."""
        return {
            "base_dim": self.base_dim,
            "decoder_base_dim": self.decoder_base_dim,
            "z_dim": self.z_dim,
            "dim_mult": list(self.dim_mult),
            "num_res_blocks": self.num_res_blocks,
            "temperal_downsample": list(self.temporal_downsample),
            "is_residual": self.is_residual,
            "in_channels": self.in_channels,
            "out_channels": self.out_channels,
            "patch_size": self.patch_size if self.patch_size > 1 else None,
            "scale_factor_temporal": self.temporal_scale,
            "scale_factor_spatial": self.spatial_scale,
        }

    @classmethod
    def of_shapes(cls, shapes: Shapes, source: str) -> WanVaeConfig:
        """Read the configuration from ``shapes``, under original or diffusers names.

        Args:
            shapes: Shape of every tensor by name, prefixes already stripped.
            source: What to call the checkpoint in an error.

        Raises:
            CheckpointError: The tensors are not those of a Wan VAE, or one that is needed is missing.
        """
        ends = {name: _end_shape(shapes, names, source) for name, names in _ENDS.items()}
        units = _encoder_units(shapes)
        levels = _levels(units)
        base_dim, in_channels = ends["conv_in"][:2]
        widths = [level.width for level in levels]
        block_counts = {level.block_count for level in levels}
        if len(block_counts) != 1 or any(width < 1 or width % base_dim for width in widths):
            raise CheckpointError(
                f"{source} is not built like a Wan VAE",
                need="encoder levels of equal depth, each a multiple of the first width",
                have=f"first width {base_dim}, (width, depth) {[(level.width, level.block_count) for level in levels]}",
            )
        return cls(
            base_dim=base_dim,
            decoder_base_dim=ends["norm_out"][0],
            z_dim=ends["latent"][0],
            dim_mult=tuple(width // base_dim for width in widths),
            num_res_blocks=block_counts.pop(),
            temporal_downsample=tuple(level.halves_time for level in levels[:-1]),
            is_residual=any(place.within for place in units),
            patch_size=2 if in_channels >= _FOLDED_CHANNELS else 1,
            in_channels=in_channels,
            out_channels=ends["conv_out"][0],
        )


def wan_vae_config_of(vae: nn.Module) -> WanVaeConfig:
    """Return the configuration of ``vae``, an ``AutoencoderKLWan``, read from its own tensors.

    Raises:
        CheckpointError: It is another kind of model.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in vae.state_dict().items()}
    return WanVaeConfig.of_shapes(shapes, f"the given {type(vae).__name__}")


class _Place(NamedTuple):
    """Where a unit runs: its block, and for Wan 2.2 its place within (resampler last), else ``()``."""

    block: int
    within: tuple[int, ...]


@dataclass
class _Level:
    """One resolution of the encoder."""

    width: int = 0
    block_count: int = 0
    halves_time: bool = False


@dataclass
class _Unit:
    """The weights of one residual block or resampler that tell its kind."""

    shapes: dict[str, Shape] = field(default_factory=dict)

    @property
    def is_resampler(self) -> bool:
        """Whether it ends a level."""
        return "resample.1" in self.shapes


def _end_shape(shapes: Shapes, names: tuple[str, ...], source: str) -> Shape:
    """Return the shape of the first of ``names`` that there is."""
    for name in names:
        if shapes.get(name):
            return shapes[name]
    raise CheckpointError(
        f"{source} is not a whole Wan VAE",
        need=f"tensor {names[0]!r} (diffusers: {names[1]!r})",
        have=f"{len(shapes)} tensors: {', '.join(list(shapes)[:3])} ...",
        remedy="Use a Wan 2.1 or Wan 2.2 VAE file.",
    )


def _encoder_units(shapes: Shapes) -> dict[_Place, _Unit]:
    """Return the encoder's residual blocks and resamplers in running order."""
    units: dict[_Place, _Unit] = {}
    for name, shape in shapes.items():
        match = _ENCODER_UNIT.match(name)
        if match and shape:
            units.setdefault(_place_of(match), _Unit()).shapes[match.group(3)] = shape
    return dict(sorted(units.items()))


def _place_of(match: re.Match[str]) -> _Place:
    """Return where the unit of a matched name runs."""
    within = match.group(2)
    if within is None:
        return _Place(int(match.group(1)), ())
    digits = within.rpartition(".")[2]
    return _Place(int(match.group(1)), (0, int(digits)) if digits.isdigit() else (1, 0))


def _levels(units: Mapping[_Place, _Unit]) -> list[_Level]:
    """Return the levels of the encoder: each ends with a resampler, the last with the encoder."""
    levels = [_Level()]
    for unit in units.values():
        if unit.is_resampler:
            levels[-1].halves_time = "time_conv" in unit.shapes
            levels.append(_Level())
        elif levels[-1].block_count == 0:
            levels[-1] = _Level(width=next(iter(unit.shapes.values()))[0], block_count=1)
        else:
            levels[-1].block_count += 1
    return levels
