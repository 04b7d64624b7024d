"""Packed GGUF blocks become the very numbers that the gguf package gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lowmem_core.load.gguf_dequant import GGUF_BLOCKS

gguf = pytest.importorskip("gguf")

# Where each type keeps its float16 scales; random bytes there could be NaN.
HALF_FIELDS = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_blocks(kind: str, count: int, seed: int = 0) -> np.ndarray:
    """Return ``count`` blocks of every bit pattern, with finite scales: uint8 ``[count, nbytes]``."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (count, GGUF_BLOCKS[kind].nbytes), dtype=np.uint8)
    for offset in HALF_FIELDS[kind]:
        scales = (random.standard_normal((count, 1)) * 0.01).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8)
    return blocks


@pytest.mark.parametrize("kind", GGUF_BLOCKS)
def test_values_are_those_of_the_reference(kind: str) -> None:
    """Every bit pattern of every packed type gives the same float32 bits."""
    blocks = random_blocks(kind, 515)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    actual = GGUF_BLOCKS[kind].decode(torch.from_numpy(blocks))
    assert actual.dtype == torch.float32
    assert np.array_equal(actual.numpy().view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("kind", GGUF_BLOCKS)
def test_block_sizes_are_those_of_the_format(kind: str) -> None:
    """A wrong size would shift every block after the first."""
    sizes = gguf.constants.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    assert (GGUF_BLOCKS[kind].elements, GGUF_BLOCKS[kind].nbytes) == sizes


@pytest.mark.parametrize("kind", GGUF_BLOCKS)
def test_blocks_may_be_decoded_in_any_portions(kind: str) -> None:
    """Decoding in portions bounds the working memory and changes no bit."""
    blocks, decode = torch.from_numpy(random_blocks(kind, 9)), GGUF_BLOCKS[kind].decode
    portions = torch.cat([decode(blocks[:4]), decode(blocks[4:])])
    assert torch.equal(portions, decode(blocks))
