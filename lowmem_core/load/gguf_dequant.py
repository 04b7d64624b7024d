"""GGUF's packed blocks to float32 in torch, on any device, with the values of ``gguf.quants.dequantize`` bit for bit.

A packed tensor is a row of blocks. Each block holds a fixed number of elements as small integers and one or two
scales; the K types have a second level of integer scales for groups of elements. All arithmetic is elementwise, so
blocks may be decoded in any portions. Operations follow the order of the reference, because float32 rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_K_SCALES = 12


class GgufBlock(NamedTuple):
    """One packed type.

    Attributes:
        elements: Elements of a block.
        nbytes: Bytes of a block.
        decode: From uint8 ``[blocks, nbytes]`` to float32 ``[blocks, elements]``.
    """

    elements: int
    nbytes: int
    decode: Callable[[Tensor], Tensor]


def _split(blocks: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Cut the bytes of each block into fields of ``sizes``; the last field takes what is left."""
    return torch.split(blocks, [*sizes, blocks.shape[1] - sum(sizes)], dim=1)


def _half(field: Tensor) -> Tensor:
    """Read a field of two bytes as float16: float32 ``[blocks, 1]``."""
    return field.contiguous().view(torch.float16).float()


def _signed(field: Tensor) -> Tensor:
    """Read bytes as signed integers: float32."""
    return field.contiguous().view(torch.int8).float()


def _bits(field: Tensor, shifts: range, mask: int, group: int) -> Tensor:
    """Unpack bit fields: each run of ``group`` bytes is repeated once per shift: uint8 ``[blocks, elements]``."""
    amounts = torch.arange(shifts.start, shifts.stop, shifts.step, dtype=torch.uint8, device=field.device)
    amounts = amounts.view(1, 1, -1, 1)
    return ((field.reshape(len(field), -1, 1, group) >> amounts) & mask).reshape(len(field), -1)


def _nibbles(field: Tensor, group: int) -> Tensor:
    return _bits(field, range(0, 8, 4), 0x0F, group)


def _fifth_bits(field: Tensor) -> Tensor:
    """Unpack four bytes to the highest bits of 32 elements, first element lowest."""
    amounts = torch.arange(8, dtype=torch.uint8, device=field.device)
    return ((field.unsqueeze(-1) >> amounts) & 1).reshape(len(field), 32)


def _q4_0(blocks: Tensor) -> Tensor:
    scale, codes = _split(blocks, 2)
    return _half(scale) * (_nibbles(codes, 16).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    scale, low, codes = _split(blocks, 2, 2)
    return (_half(scale) * _nibbles(codes, 16).float()).add_(_half(low))


def _q5_0(blocks: Tensor) -> Tensor:
    scale, high, codes = _split(blocks, 2, 4)
    return _half(scale) * ((_nibbles(codes, 16) | (_fifth_bits(high) << 4)).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    scale, low, high, codes = _split(blocks, 2, 2, 4)
    return (_half(scale) * (_nibbles(codes, 16) | (_fifth_bits(high) << 4)).float()).add_(_half(low))


def _q8_0(blocks: Tensor) -> Tensor:
    scale, codes = _split(blocks, 2)
    return _signed(codes) * _half(scale)


def _grouped(scales: Tensor, codes: Tensor, lows: Tensor | None = None) -> Tensor:
    """Return ``scales * codes - lows``, with scales and lows per group: float32 ``[blocks, elements]``."""
    groups = scales.shape[1]
    values = codes.float().view(len(codes), groups, -1).mul_(scales.unsqueeze(-1))
    if lows is not None:
        values.sub_(lows.unsqueeze(-1))
    return values.view(len(codes), -1)


def _six_bit_scales(field: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack twelve bytes to eight scales and eight lows, six bits each: float32 ``[blocks, 8]`` twice."""
    first, second, rest = field.view(len(field), 3, 4).unbind(1)
    scales = torch.cat([first & 0x3F, (rest & 0x0F) | ((first >> 2) & 0x30)], dim=1)
    lows = torch.cat([second & 0x3F, (rest >> 4) | ((second >> 2) & 0x30)], dim=1)
    return scales.float(), lows.float()


def _q2_k(blocks: Tensor) -> Tensor:
    both, codes, scale, low = _split(blocks, 16, 64, 2)
    scales = _half(scale) * (both & 0x0F).float()
    lows = _half(low) * (both >> 4).float()
    return _grouped(scales, _bits(codes, range(0, 8, 2), 3, 32), lows)


def _q3_k(blocks: Tensor) -> Tensor:
    high, codes, packed, scale = _split(blocks, 32, 64, _K_SCALES)
    low_bits = _bits(packed[:, :8], range(0, 8, 4), 0x0F, 8)
    high_bits = _bits(packed[:, 8:], range(0, 8, 2), 3, 4)
    scales = _half(scale) * ((low_bits | (high_bits << 4)).float() - 32)
    is_low = _bits(high, range(8), 1, 32) ^ 1
    return _grouped(scales, _bits(codes, range(0, 8, 2), 3, 32).float() - (is_low << 2).float())


def _q4_k(blocks: Tensor) -> Tensor:
    scale, low, packed, codes = _split(blocks, 2, 2, _K_SCALES)
    scales, lows = _six_bit_scales(packed.contiguous())
    return _grouped(_half(scale) * scales, _nibbles(codes, 32), _half(low) * lows)


def _q5_k(blocks: Tensor) -> Tensor:
    scale, low, packed, high, codes = _split(blocks, 2, 2, _K_SCALES, 32)
    scales, lows = _six_bit_scales(packed.contiguous())
    values = _nibbles(codes, 32) | (_bits(high, range(8), 1, 32) << 4)
    return _grouped(_half(scale) * scales, values, _half(low) * lows)


def _q6_k(blocks: Tensor) -> Tensor:
    low, high, scales, scale = _split(blocks, 128, 64, 16)
    values = _nibbles(low, 64) | (_bits(high, range(0, 8, 2), 3, 32) << 4)
    return _grouped(_half(scale) * _signed(scales), values.float() - 32)


GGUF_BLOCKS = {
    "Q4_0": GgufBlock(32, 18, _q4_0),
    "Q4_1": GgufBlock(32, 20, _q4_1),
    "Q5_0": GgufBlock(32, 22, _q5_0),
    "Q5_1": GgufBlock(32, 24, _q5_1),
    "Q8_0": GgufBlock(32, 34, _q8_0),
    "Q2_K": GgufBlock(256, 84, _q2_k),
    "Q3_K": GgufBlock(256, 110, _q3_k),
    "Q4_K": GgufBlock(256, 144, _q4_k),
    "Q5_K": GgufBlock(256, 176, _q5_k),
    "Q6_K": GgufBlock(256, 210, _q6_k),
}
