"""A tiny SentencePiece vocabulary for tiny text encoders, and its bytes as a file or a tensor holds them."""

from __future__ import annotations

import struct

from ..text.spiece import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Piece, Spiece

_SPACE = "\u2581"
_SPECIAL = (Piece("<pad>", 0.0, CONTROL), Piece("</s>", 0.0, CONTROL), Piece("<unk>", 0.0, UNKNOWN))
_WORDS = ("a", "the", "cat", "sea", "with", "wave", "waves", "on", "of", "red", "boat", "slow", "motion", "white")
_PARTS = ("ing", "er", "ed", "at", "in", "th", "he", "oo", "ea", "st", "&", "\u00e9", "\u6d77", "\u732b", "\u2026")
_CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!?-'\"<>;:()"
_UNIGRAM = 1
_VARINT, _BYTES, _FIXED32 = 0, 2, 5


def tiny_spiece() -> Spiece:
    """Return a vocabulary with pieces of each kind: special ones, words, parts of words, characters, a user's own."""
    texts = [_SPACE, *(_SPACE + word for word in _WORDS), *_PARTS, *_CHARACTERS]
    normal = [Piece(text, _rounded(-2.0 - 0.05 * place), NORMAL) for place, text in enumerate(texts)]
    return Spiece((*_SPECIAL, *normal, Piece("<extra_id_0>", 0.0, USER_DEFINED)))


def spiece_bytes(spiece: Spiece) -> bytes:
    """Return a vocabulary as SentencePiece writes it: a protobuf message."""
    pieces = b"".join(_field(1, _piece(piece)) for piece in spiece.pieces)
    trainer = _number(3, _UNIGRAM) + _number(4, len(spiece.pieces)) + _number(40, spiece.unknown_id)
    trainer += _number(41, (1 << 64) - 1) + _number(42, 1) + _number(43, 0)  # no begin, the end is 1, padding is 0
    normaliser = _field(1, b"identity" if not spiece.charsmap else b"user_defined")
    return pieces + _field(2, trainer) + _field(3, normaliser + _field(2, spiece.charsmap))


def _piece(piece: Piece) -> bytes:
    """Return the message of one piece."""
    score = _varint(2 << 3 | _FIXED32) + struct.pack("<f", piece.score)
    return _field(1, piece.text.encode("utf-8")) + score + _number(3, piece.kind)


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value)


def _varint(value: int) -> bytes:
    """Return an integer, seven bits a byte, the lowest first; the top bit says that more follow."""
    result = bytearray()
    while value > 0x7F:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*result, value])


def _rounded(score: float) -> float:
    """Return ``score`` as a file keeps it, in 32 bits."""
    (rounded,) = struct.unpack("<f", struct.pack("<f", score))
    return float(rounded)
