"""Closed forms: bytes live on the device while Lance reads a prompt, and while it predicts.

They mirror ``families.lance`` moment by moment; a test holds them against the simulated real code.
"""

from __future__ import annotations

from dataclasses import dataclass

_FLOAT = 4
_TIME_VALUES = 256
_LATENT_CHANNELS = 48
_HELD_LATENTS = 12
_BOUNDARY = 2


@dataclass(frozen=True)
class LanceForwardSize:
    """What decides the activations of a run.

    Attributes:
        latents: Of the image, N.
        prompt_tokens: Of the longest segment of the prompt.
        prefix_tokens: Of both sides together: what the image looks back on.
        segment_tokens: Of all segments together.
        width: Of a token, D.
        kv_width: Of the keys of a token.
        head_width: Of a head.
        mlp_width: Inside an MLP.
        layers: Of a tower.
        element_bytes: Of a value, 2 or 4.
    """

    latents: int
    prompt_tokens: int
    prefix_tokens: int
    segment_tokens: int
    width: int
    kv_width: int
    head_width: int
    mlp_width: int
    layers: int
    element_bytes: int

    @property
    def prefix_bytes(self) -> int:
        """Bytes of the keys and values of both sides."""
        return 2 * self.layers * self.prefix_tokens * self.kv_width * self.element_bytes

    def states(self, tokens: int) -> int:
        """Return the bytes of hidden states."""
        return tokens * self.width * self.element_bytes

    def floats(self, tokens: int) -> int:
        """Return the bytes of hidden states in float32."""
        return tokens * self.width * _FLOAT


def reading_bytes(size: LanceForwardSize) -> int:
    """Return the most bytes alive while the prompt is read: on the way through a layer, and when sides are joined."""
    tokens, every = size.prompt_tokens, size.segment_tokens
    read = 2 * size.layers * every * size.kv_width * size.element_bytes
    held = size.states(2 * every) + _rotation_bytes(size, every) + size.states(every) + _kv(size, every)
    seen = size.prefix_tokens
    mask = tokens * seen * (1 + size.element_bytes)
    attending = 2 * size.states(seen) + _kv(size, seen) + 3 * size.states(tokens) + mask
    return read + max(held + max(_entering(size, tokens), attending, _leaving(size, tokens)), size.prefix_bytes)


def predicting_bytes(size: LanceForwardSize, sides: int) -> int:
    """Return the most bytes alive while velocities are predicted for one side, or for two in step."""
    tokens = size.latents
    around = tokens + _BOUNDARY
    fixed = size.prefix_bytes + size.states(tokens) + sides * 2 * _rotation_bytes(size, around)
    fixed += _HELD_LATENTS * tokens * _LATENT_CHANNELS * _FLOAT
    heads = size.states(tokens) + _kv(size, tokens)
    states = sides * size.states(around)
    entering = (sides - 1) * heads + _entering(size, tokens)
    seen = around + size.prefix_tokens
    attending = sides * heads + (sides - 1) * size.states(around) + _attending(size, around, seen)
    leaving = sides * size.states(around) + _leaving(size, tokens)
    times = tokens * 3 * _TIME_VALUES * _FLOAT + 3 * size.states(tokens)
    return fixed + states + max(entering, attending, leaving, times)


def _entering(size: LanceForwardSize, tokens: int) -> int:
    """Return the bytes of norm, projections and rotation, the hidden states apart."""
    norming = 2 * size.floats(tokens) + size.states(tokens)
    turning = size.states(tokens) + _kv(size, tokens) + 7 * size.floats(tokens) // 2
    return max(norming, turning)


def _attending(size: LanceForwardSize, tokens: int, seen: int) -> int:
    """Return the bytes of joined heads, repeated keys and values, and what was gathered."""
    joined = size.states(tokens) + _kv(size, tokens) + _kv(size, seen)
    return joined + 2 * size.states(seen) + 2 * size.states(tokens)


def _leaving(size: LanceForwardSize, tokens: int) -> int:
    """Return the bytes of output projection and MLP, what goes in apart."""
    inner = tokens * size.mlp_width * size.element_bytes
    return max(2 * size.states(tokens) + 2 * inner, size.states(tokens) + 2 * size.floats(tokens))


def _kv(size: LanceForwardSize, tokens: int) -> int:
    """Return the bytes of keys and values."""
    return 2 * tokens * size.kv_width * size.element_bytes


def _rotation_bytes(size: LanceForwardSize, tokens: int) -> int:
    """Return the bytes of one table of cosines and one of sines."""
    return 2 * tokens * size.head_width * size.element_bytes
