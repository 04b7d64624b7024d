"""Which weights of a checkpoint are stored in few bits, and how they turn into numbers.

Files say it in three ways: fp8 without scales, fp8 with a scale for each weight (marked by one tensor
``scaled_fp8``, or by a ``comfy_quant`` note beside each weight), and GGUF's packed blocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..weights import Checkpoint, TensorInfo
from .gguf_dequant import GGUF_BLOCKS

FP8_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
_COMFY_FORMATS = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
_MARK = "scaled_fp8"
_NOTE = ".comfy_quant"
_WEIGHT = ".weight"
_SCALES = (".scale_weight", ".weight_scale")
_IGNORED = (".scale_input", ".input_scale", _NOTE)
_PORTION = 1 << 22


@dataclass(frozen=True)
class Encoding:
    """How one weight is stored.

    Attributes:
        kind: ``F8_E4M3``, ``F8_E5M2`` or a packed type of GGUF; ``""`` for a plain float with a scale.
        shape: The shape of the unpacked weight.
        scale_name: The tensor whose values it is to be multiplied by, or None.
    """

    kind: str
    shape: tuple[int, ...]
    scale_name: str | None = None

    @property
    def storage_dtype(self) -> torch.dtype:
        """What the stored tensor consists of."""
        return FP8_DTYPES.get(self.kind, torch.uint8)

    @property
    def storage_shape(self) -> tuple[int, ...]:
        """The shape of the stored tensor."""
        if self.kind not in GGUF_BLOCKS:
            return self.shape
        block = GGUF_BLOCKS[self.kind]
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows, self.shape[-1] // block.elements * block.nbytes


def encodings_of(checkpoint: Checkpoint) -> tuple[dict[str, Encoding], frozenset[str]]:
    """Return how the encoded weights of ``checkpoint`` are stored, and the names of notes that are no weights.

    Raises:
        CheckpointError: A weight is stored in a way we cannot read, or its scale is missing.
    """
    notes = {name for name in checkpoint if name.endswith(_IGNORED) or name.rpartition(".")[2] == _MARK}
    is_marked = any(name.rpartition(".")[2] == _MARK for name in notes)
    encodings: dict[str, Encoding] = {}
    for name, info in checkpoint.items():
        encoding = None if name in notes else _encoding_of(checkpoint, name, info, is_marked)
        if encoding is not None:
            encodings[name] = encoding
    return encodings, frozenset(notes)


def decoded(raw: Tensor, encoding: Encoding, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the weight that ``raw`` stands for.

    Values are computed in float32 and rounded once. Work is done in portions, so that little more than the result is
    alive at a time.

    Args:
        raw: Of ``encoding.storage_dtype`` and ``storage_shape``, any device.
        encoding: How it is stored.
        scale: One value, or one per row; None for no scale.
        dtype: What is wanted.

    Returns:
        ``encoding.shape`` in ``dtype``, on the device of ``raw``.
    """
    if encoding.kind not in GGUF_BLOCKS and scale is None:
        return raw.to(dtype)
    rows = raw.reshape(encoding.storage_shape[0] if raw.ndim else 1, -1)
    width = 1
    for size in encoding.shape[1:]:
        width *= size
    if encoding.kind in GGUF_BLOCKS:
        width = encoding.shape[-1]
    result = torch.empty(len(rows), width, dtype=dtype, device=raw.device)
    step = max(1, _PORTION // width)
    per_row = scale is not None and scale.numel() > 1
    for begin in range(0, len(rows), step):
        part = _floats(rows[begin : begin + step], encoding)
        if scale is not None:
            part = part.mul_(scale.reshape(-1, 1)[begin : begin + step] if per_row else scale.reshape(()))
        result[begin : begin + step] = part
    return result.view(encoding.shape)


def _floats(rows: Tensor, encoding: Encoding) -> Tensor:
    """Return stored rows as new float32 rows, unscaled."""
    if encoding.kind not in GGUF_BLOCKS:
        return rows.to(torch.float32, copy=True)
    block = GGUF_BLOCKS[encoding.kind]
    return block.decode(rows.reshape(-1, block.nbytes)).view(len(rows), -1)


def _encoding_of(checkpoint: Checkpoint, name: str, info: TensorInfo, is_marked: bool) -> Encoding | None:
    """Return how tensor ``name`` is stored, or None for a plain one."""
    if info.packing is not None:
        if info.packing.kind not in GGUF_BLOCKS:
            raise _unreadable(checkpoint, name, info.packing.kind)
        return Encoding(info.packing.kind, info.packing.shape)
    if not name.endswith(_WEIGHT):
        return Encoding(info.dtype, info.shape) if info.dtype in FP8_DTYPES else None
    layer = name.removesuffix(_WEIGHT)
    scales = [layer + ending for ending in _SCALES if layer + ending in checkpoint]
    is_fp8 = info.dtype in FP8_DTYPES
    if layer + _NOTE in checkpoint:
        _check_note(checkpoint, layer, info)
    is_scaled = layer + _NOTE in checkpoint or (is_marked and is_fp8)
    if is_scaled and not scales:
        raise CheckpointError(
            f"{checkpoint.source} lacks the scale of {name!r}",
            need=f"a tensor {layer + _SCALES[layer + _NOTE in checkpoint]!r}, for the file says it is scaled",
            have="none; without scales the weights would be silently wrong",
            remedy="Download the file again, or use another conversion of the model.",
        )
    if scales:
        _check_scale(checkpoint, scales[0], info)
        return Encoding(info.dtype if is_fp8 else "", info.shape, scales[0])
    return Encoding(info.dtype, info.shape) if is_fp8 else None


def _check_note(checkpoint: Checkpoint, layer: str, info: TensorInfo) -> None:
    """Raise unless the note beside a weight names a format we read, and the weight has it."""
    try:
        note = json.loads(bytes(checkpoint.read(layer + _NOTE).flatten().tolist()))
        stored = note["format"]
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{checkpoint.source} has an unreadable {layer + _NOTE!r}", have=str(error)) from error
    if _COMFY_FORMATS.get(stored) != info.dtype:
        raise _unreadable(checkpoint, layer + _WEIGHT, f"{stored} in {info.dtype}")


def _check_scale(checkpoint: Checkpoint, scale: str, info: TensorInfo) -> None:
    """Raise unless ``scale`` holds one value, or one for each row."""
    shape, rows = checkpoint[scale].shape, info.shape[0] if info.shape else 1
    if shape not in ((), (1,), (rows,), (rows, 1)) or checkpoint[scale].dtype not in ("F32", "F16", "BF16"):
        raise CheckpointError(
            f"{checkpoint.source} has a scale of another shape than we know: {scale!r}",
            need=f"one value, or {rows}",
            have=str(checkpoint[scale]),
        )


def _unreadable(checkpoint: Checkpoint, name: str, kind: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.source} stores {name!r} in a way we cannot read",
        need=f"plain floats, fp8 ({', '.join(_COMFY_FORMATS)}) or GGUF {', '.join(_kinds())}",
        have=kind,
        remedy="Use another conversion of the model.",
    )


def _kinds() -> Iterator[str]:
    yield from GGUF_BLOCKS
