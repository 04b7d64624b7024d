"""Closed forms: bytes live on the device while a Wan transformer runs, lean or by diffusers' own forward.

They mirror ``families.wan.lean_block`` and diffusers' block moment by moment; a test holds them against the simulated
real code. What the caller holds (latents, embeds) and what quantised layers or adapters need beside is not in them.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAN_CHUNK_TOKENS = 1024
LEAN_QUERY_TOKENS = 2048
_SMALLEST_CHUNK = 16
_TIMESTEP_ROWS = 64
_TIMESTEP_CHANNELS = 256
_MODULATIONS = 6
_QUERY_GROUP = 256
_FLOAT = 4
_INDEX = 8


@dataclass(frozen=True)
class WanForwardSize:
    """What decides the activations of one forward.

    Attributes:
        tokens: Patches of the latents, S.
        width: Of a token, D.
        heads: Of attention.
        ffn_width: Of the feed-forward layer, F.
        context_tokens: Text tokens, and image tokens where the model takes them.
        patch_values: Values that a token becomes in the end.
        element_bytes: Of a value, 2 or 4.
        per_token_timesteps: Whether each token has a timestep of its own.
    """

    tokens: int
    width: int
    heads: int
    ffn_width: int
    context_tokens: int
    patch_values: int
    element_bytes: int
    per_token_timesteps: bool = False

    @property
    def state_bytes(self) -> int:
        """Bytes of the hidden state, u."""
        return self.tokens * self.width * self.element_bytes

    @property
    def table_bytes(self) -> int:
        """Bytes of one of the two tables of rotations as diffusers makes them."""
        return self.tokens * (self.width // self.heads) * _FLOAT

    @property
    def context_bytes(self) -> int:
        """Bytes of what one pass attends to."""
        return self.context_tokens * self.width * self.element_bytes

    @property
    def patches_bytes(self) -> int:
        """Bytes of a prediction."""
        return self.tokens * self.patch_values * self.element_bytes


def lean_forward_bytes(size: WanForwardSize, passes: int = 1, chunk_tokens: int = LEAN_CHUNK_TOKENS) -> int:
    """Return the most bytes alive while a lean transformer runs ``passes`` passes in step.

    Args:
        size: What it runs on.
        passes: 1 or 2.
        chunk_tokens: The most tokens of a chunk.
    """
    chunk = _Chunk.of(size, _even(size.tokens, max(chunk_tokens, 2 * _SMALLEST_CHUNK)))
    rows = _even(size.tokens, max(chunk_tokens, LEAN_QUERY_TOKENS), _QUERY_GROUP)
    queries, scores = rows * size.width * size.element_bytes, rows * size.heads * _FLOAT
    state, context = size.state_bytes, size.context_bytes
    kept = size.table_bytes + passes * context + _timestep_bytes(size)
    attending = queries + max(chunk.projecting, chunk.adding, queries + scores)
    beside = max(2 * state + attending, _context_bytes(size), 2 * context + attending + queries, chunk.feeding)
    blocks = passes * state + beside
    begin = max(3 * size.table_bytes, (1 + max(passes, 2)) * state, passes * state + _embedding_bytes(size))
    finish = passes * (state + size.patches_bytes) + size.patches_bytes + chunk.projecting
    return max(kept + max(blocks, finish), begin + kept)


def stock_forward_bytes(size: WanForwardSize, passes: int = 1) -> int:
    """Return the most bytes alive while diffusers' own forward runs.

    Args:
        size: What it runs on.
        passes: 1, or 2 in step.
    """
    state, wide = size.state_bytes, size.tokens * size.width * _FLOAT
    copies = 0 if size.element_bytes == _FLOAT else wide
    rotating = 6 * state + wide * 3 // 2
    feeding = 4 * state + 2 * size.tokens * size.ffn_width * size.element_bytes
    adding = 5 * state + 2 * copies + (wide if copies else 2 * wide)
    blocks, kept = max(rotating, feeding, adding), 2 * size.table_bytes + passes * size.context_bytes
    modulation = 0
    if size.per_token_timesteps:
        kept += (1 + _MODULATIONS) * state + size.tokens * _TIMESTEP_CHANNELS * _FLOAT
        modulation = _MODULATIONS * wide
        blocks = max(state + modulation + _MODULATIONS * copies, modulation + blocks)
    others = (passes - 1) * state
    blocks = max(blocks + 3 * size.context_bytes, state + modulation + size.context_bytes + _context_bytes(size))
    finish = passes * (state + size.patches_bytes) + 4 * wide + size.patches_bytes
    return kept + others + max(blocks, finish, _embedding_bytes(size))


@dataclass(frozen=True)
class _Chunk:
    """Bytes that one chunk of tokens takes at its worst moments.

    Attributes:
        projecting: While it is normed, scaled, projected and rotated.
        adding: While something is added to it, times a gate.
        feeding: While it goes through the feed-forward layer.
    """

    projecting: int
    adding: int
    feeding: int

    @classmethod
    def of(cls, size: WanForwardSize, tokens: int) -> _Chunk:
        """Count for ``tokens`` tokens."""
        rows, wide = tokens * size.width * size.element_bytes, tokens * size.width * _FLOAT
        gathered = wide if size.per_token_timesteps else 0
        adding = rows + 3 * wide + 2 * gathered
        inner = tokens * size.ffn_width * size.element_bytes
        projecting = 2 * rows + (2 * wide if size.element_bytes == _FLOAT else 3 * wide)
        return cls(max(projecting, rows + 3 * gathered), adding, max(2 * rows + 2 * inner, rows + adding + wide))


def _timestep_bytes(size: WanForwardSize) -> int:
    """Return the bytes of embedded timesteps and of which token has which, as lean transformers keep them."""
    rows = min(size.tokens, _TIMESTEP_ROWS) if size.per_token_timesteps else 1
    index = size.tokens * _INDEX if size.per_token_timesteps else 0
    return index + (rows * (2 + 2 * _MODULATIONS) + 2 * _MODULATIONS) * size.width * _FLOAT


def _embedding_bytes(size: WanForwardSize) -> int:
    """Return the bytes that embedding a context and timesteps takes beside their results."""
    rows = size.tokens if size.per_token_timesteps else 1
    return 3 * size.context_bytes + min(rows, _TIMESTEP_ROWS) * (3 * size.width + _TIMESTEP_CHANNELS) * _FLOAT


def _context_bytes(size: WanForwardSize) -> int:
    """Return the bytes that keys and values of a context take while they are made; norms count in float32."""
    copies = 1 if size.element_bytes == _FLOAT else 3
    return 3 * size.context_bytes + copies * size.context_tokens * size.width * _FLOAT


def _even(count: int, most: int, multiple: int = 1) -> int:
    """Return the longest of as few even chunks as there can be, in whole multiples."""
    groups = -(-count // multiple)
    return min(count, multiple * -(-groups // -(-groups // max(1, most // multiple))))
