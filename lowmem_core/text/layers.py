"""The two parts of a text encoder that are not used as transformers has them: the token table, and stored outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..load import Encoding
from ..load.encodings import decoded
from ..weights import Checkpoint


@dataclass(frozen=True)
class TokenTable:
    """The embedding of each token, left in its file.

    Attributes:
        checkpoint: The file.
        name: The tensor, ``[vocabulary, width]`` as the model knows it.
        dtype: What the encoder computes in.
        encoding: How it is stored, or None for plain floats.
    """

    checkpoint: Checkpoint
    name: str
    dtype: torch.dtype
    encoding: Encoding | None = None

    def rows(self, ids: Tensor) -> Tensor:
        """Return the embeddings ``[1, L, width]`` of ``ids`` ``[1, L]`` in ``dtype`` on the CPU.

        Raises:
            CheckpointError: A token is not in the table, or the file can no longer be read.
        """
        size = self.checkpoint[self.name].unpacked_shape[0]
        if ids.numel() and int(ids.max()) >= size:
            raise CheckpointError(
                f"the tokenizer is not that of {self.checkpoint.source}",
                need=f"tokens below {size}",
                have=str(int(ids.max())),
                remedy="Use the tokenizer that belongs to the text encoder.",
            )
        chosen = _picked(self.checkpoint.read(self.name), ids[0])
        if self.encoding is None:
            return chosen.to(self.dtype).unsqueeze(0)
        scale = None
        if self.encoding.scale_name is not None:
            scale = self.checkpoint.read(self.encoding.scale_name).float()
            scale = scale.reshape(-1)[ids[0]] if scale.numel() > 1 else scale
        shape = (len(chosen), *self.encoding.shape[1:])
        return decoded(chosen, Encoding(self.encoding.kind, shape), scale, self.dtype).unsqueeze(0)


class StoredOutput(nn.Module):
    """The last layer of a feed-forward part whose weight is stored in few bits.

    transformers converts the values to the dtype of that layer's weight, which would round them to fp8; here the
    layer has no attribute ``weight``, and says itself what it computes in.

    Args:
        stored: The layer.
        dtype: What it computes in.
    """

    def __init__(self, stored: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.stored, self.dtype = stored, dtype
        self.weight = None

    def forward(self, values: Tensor) -> Tensor:
        """Return ``values`` ``[..., in_features]`` times the weight."""
        output: Tensor = self.stored(values.to(self.dtype))
        return output


def _picked(table: Tensor, ids: Tensor) -> Tensor:
    """Return rows ``ids`` ``[L]`` of ``table``, of any dtype; torch cannot pick rows of fp8."""
    if table.element_size() == 1:
        return table.view(torch.uint8)[ids].view(table.dtype)
    return table[ids]
