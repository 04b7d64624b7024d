"""The two parts of a text encoder that are not used as transformers has them: the token table, and stored outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..load import Encoding
from ..load.encodings import decoded
from ..load.rows import read_rows
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
        chosen = read_rows(self.checkpoint, self.name, ids[0])
        if self.encoding is None:
            return chosen.to(self.dtype).unsqueeze(0)
        shape = (len(chosen), *self.encoding.shape[1:])
        return decoded(chosen, Encoding(self.encoding.kind, shape), self._scale(ids[0]), self.dtype).unsqueeze(0)

    def _scale(self, rows: Tensor) -> Tensor | None:
        """Return the scale of ``rows``: one value, one for each, or None."""
        name = None if self.encoding is None else self.encoding.scale_name
        if name is None:
            return None
        scale = self.checkpoint.read(name).float().reshape(-1)
        return scale[rows] if scale.numel() > 1 else scale


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
