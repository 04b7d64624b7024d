"""From the names in original Wan VAE files to the names of diffusers' ``AutoencoderKLWan``.

The original numbers its layers in the order in which they run: flat in Wan 2.1 (``decoder.upsamples.7``),
level by level in Wan 2.2 (``decoder.upsamples.1.upsamples.3``). So the map is read off the module tree by
walking it in that order; it holds for every width, depth and number of levels, and no table is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

_RESIDUAL_PARTS = {
    "norm1": "residual.0",
    "conv1": "residual.2",
    "norm2": "residual.3",
    "conv2": "residual.6",
    "conv_shortcut": "shortcut",
}


def wan_vae_key_map(vae: nn.Module) -> dict[str, str]:
    """Return ``{original name: diffusers name}`` for every tensor of ``vae``.

    Args:
        vae: An ``AutoencoderKLWan`` on any device, meta included.
    """
    return {
        _original_leaf(original, leaf): f"{ours}.{leaf}"
        for original, ours in _units(vae)
        for leaf in vae.get_submodule(ours).state_dict()
    }


def _original_leaf(unit: str, leaf: str) -> str:
    """Return the original name of ``leaf`` within ``unit``."""
    first, dot, rest = leaf.partition(".")
    return f"{unit}.{_RESIDUAL_PARTS.get(first, first)}{dot}{rest}"


def _units(vae: Any) -> Iterator[tuple[str, str]]:
    """Yield ``(original, ours)`` names of convolutions, blocks and resamplers that cover the whole VAE."""
    yield "conv1", "quant_conv"
    yield "conv2", "post_quant_conv"
    for side, blocks, stack in (("encoder", "down_blocks", "downsamples"), ("decoder", "up_blocks", "upsamples")):
        tree = getattr(vae, side)
        yield f"{side}.conv1", f"{side}.conv_in"
        yield from _middle_units(side, tree.mid_block)
        yield from _stack_units(f"{side}.{stack}", stack, f"{side}.{blocks}", getattr(tree, blocks))
        yield f"{side}.head.0", f"{side}.norm_out"
        yield f"{side}.head.2", f"{side}.conv_out"


def _middle_units(side: str, middle: Any) -> Iterator[tuple[str, str]]:
    """Yield the units of the middle block, where residual blocks and attentions alternate."""
    for index in range(len(middle.resnets)):
        yield f"{side}.middle.{2 * index}", f"{side}.mid_block.resnets.{index}"
    for index in range(len(middle.attentions)):
        yield f"{side}.middle.{2 * index + 1}", f"{side}.mid_block.attentions.{index}"


def _stack_units(original: str, stack: str, ours: str, blocks: Any) -> Iterator[tuple[str, str]]:
    """Yield the units of ``blocks`` in running order, numbered flat (2.1) or within each level (2.2)."""
    flat = 0
    for level, block in enumerate(blocks):
        is_nested = hasattr(block, "avg_shortcut")
        for index, unit in enumerate(_block_units(block)):
            name = f"{original}.{level}.{stack}.{index}" if is_nested else f"{original}.{flat}"
            yield name, f"{ours}.{level}.{unit}".removesuffix(".")
            flat += 1


def _block_units(block: Any) -> list[str]:
    """Return the names of the units within ``block`` in running order; ``""`` when it is itself one."""
    if not hasattr(block, "resnets"):
        return [""]
    units = [f"resnets.{index}" for index in range(len(block.resnets))]
    for name in ("downsampler", "upsampler"):
        units += [name] if getattr(block, name, None) is not None else []
    return units + [f"upsamplers.{index}" for index in range(len(getattr(block, "upsamplers", None) or ()))]
