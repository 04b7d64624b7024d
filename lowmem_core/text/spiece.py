"""A SentencePiece vocabulary read from its bytes, without the sentencepiece and protobuf packages.

ComfyUI's text encoder files carry one. The format is a protobuf message: pieces (text, score, kind), the settings it
was trained with, and a table that normalises characters.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
_UNIGRAM = 1
_PIECES, _TRAINER, _NORMALISER = 1, 2, 3
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_LONGEST_VARINT = 10


class Piece(NamedTuple):
    """One entry of the vocabulary; its place is its id.

    Attributes:
        text: With U+2581 for a space.
        score: Log probability.
        kind: ``NORMAL``, ``UNKNOWN``, ``CONTROL``, ``USER_DEFINED`` or another number of SentencePiece.
    """

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class Spiece:
    """A unigram vocabulary.

    Attributes:
        pieces: By id.
        charsmap: The table that normalises characters, in SentencePiece's form; empty for none.
    """

    pieces: tuple[Piece, ...]
    charsmap: bytes = b""

    @property
    def unknown_id(self) -> int:
        """The id of what is not in the vocabulary."""
        return next(number for number, piece in enumerate(self.pieces) if piece.kind == UNKNOWN)


def parse_spiece(raw: bytes, source: str) -> Spiece:
    """Read a SentencePiece model.

    Args:
        raw: Its bytes.
        source: Where they are from, for an error.

    Raises:
        CheckpointError: They are damaged, or not of a unigram vocabulary.
    """
    try:
        spiece, model_type = _parse(memoryview(raw))
    except (ValueError, struct.error) as error:
        raise CheckpointError(
            f"the tokenizer in {source} is damaged", have=str(error), remedy="Download the file again."
        ) from error
    has_unknown = any(piece.kind == UNKNOWN for piece in spiece.pieces)
    if model_type != _UNIGRAM or not has_unknown:
        raise CheckpointError(
            f"the tokenizer in {source} is not that of UMT5",
            need="a SentencePiece unigram model with a piece for what is unknown",
            have=f"{len(spiece.pieces)} pieces of model type {model_type}",
        )
    return spiece


def _parse(raw: memoryview) -> tuple[Spiece, int]:
    """Return the vocabulary and the number of the model's type."""
    pieces: list[Piece] = []
    charsmap, model_type = b"", _UNIGRAM
    for field, value in _fields(raw):
        if field == _PIECES:
            pieces.append(_piece(_message(value)))
        elif field == _TRAINER:
            model_type = next((_number(inner) for number, inner in _fields(_message(value)) if number == 3), _UNIGRAM)
        elif field == _NORMALISER:
            charsmap = next((bytes(_message(inner)) for number, inner in _fields(_message(value)) if number == 2), b"")
    return Spiece(tuple(pieces), charsmap), model_type


def _piece(raw: memoryview) -> Piece:
    """Return one piece."""
    text, score, kind = "", 0.0, NORMAL
    for field, value in _fields(raw):
        if field == 1:
            text = bytes(_message(value)).decode("utf-8")
        elif field == 2:
            (score,) = struct.unpack("<f", _message(value))
        elif field == 3:
            kind = _number(value)
    return Piece(text, score, kind)


def _fields(raw: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Yield number and value of each field of a message: an integer, or the bytes of anything else."""
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        form = tag & 7
        if form == _VARINT:
            number, at = _varint(raw, at)
            yield tag >> 3, number
            continue
        length = _FIXED.get(form)
        if form == _BYTES:
            length, at = _varint(raw, at)
        if length is None or at + length > len(raw):
            raise ValueError(f"a field of form {form} at byte {at} of {len(raw)}")
        yield tag >> 3, raw[at : at + length]
        at += length


def _varint(raw: memoryview, at: int) -> tuple[int, int]:
    """Return the integer at ``at``, and where it ends."""
    value = 0
    for place in range(_LONGEST_VARINT):
        if at + place >= len(raw):
            break
        byte = raw[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError(f"an unfinished number at byte {at} of {len(raw)}")


def _message(value: memoryview | int) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a number in place of bytes")
    return value


def _number(value: memoryview | int) -> int:
    if not isinstance(value, int):
        raise ValueError("bytes in place of a number")
    return value
