"""Prompts to embeds in one call: from the cache where they are known, else with an encoder that lives as long."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..denoise import file_marks
from ..errors import WriteError
from .cache import EmbedsCache, cache_key
from .encode import EncodeOptions, encode_prompts
from .load import load_text_encoder, model_path, tokenizer_beside
from .tokenizer import clean_prompt

_log = logging.getLogger("lowmem")


def embed_prompts(
    texts: Sequence[str],
    path: Path | str,
    device: torch.device | str,
    *,
    tokenizer: Path | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    options: EncodeOptions | None = None,
    cache: EmbedsCache | None = None,
    from_disk: bool = True,
) -> list[Tensor]:
    """Return the embeds of prompts; an encoder is loaded only if one of them is not cached, and freed afterwards.

    Cached embeds have the bits that encoding on the same kind of device gave.

    Args:
        texts: The prompts; equal ones are encoded once.
        path: The encoder, as in ``load_text_encoder``.
        device: Where to compute.
        tokenizer: As in ``load_text_encoder``.
        dtype: What to compute in.
        options: How to encode.
        cache: Where to look and to keep; None neither looks nor keeps.
        from_disk: Leave the blocks on disk until they are needed.

    Returns:
        For each prompt ``[1, max_length, width]`` on the CPU.

    Raises:
        RequestError: The encoder is missing, or an option cannot work.
        CheckpointError: The encoder, or its tokenizer, cannot be used.
        BudgetError: It does not fit, even streamed.
        NotFiniteError: It gave NaN or infinity.
    """
    options, device = options or EncodeOptions(), torch.device(device)
    cleaned = [clean_prompt(text) for text in texts]
    known: dict[str, Tensor] = {}
    keys: dict[str, str] = {}
    if cache is not None and texts:
        shared = _identity(Path(path), tokenizer) | _manner(device, dtype, options)
        keys = {text: cache_key(shared | {"text": text}) for text in cleaned}
        known = {text: found for text, key in keys.items() if (found := cache.get(key)) is not None}
    missing = {clean: text for clean, text in zip(cleaned, texts, strict=True) if clean not in known}
    if missing:  # the texts as they were given: what is cleaned twice may be another prompt
        loaded = load_text_encoder(path, dtype, tokenizer=tokenizer, from_disk=from_disk)
        encoded = encode_prompts(list(missing.values()), loaded, device, options)
        known |= zip(missing, encoded, strict=True)
    for text in missing if cache is not None else ():
        _keep(cache, keys[text], known[text])
    return [known[text] for text in cleaned]


def _identity(path: Path, tokenizer: Path | str | None) -> dict[str, object]:
    """Return what the files are: a changed file has another mark."""
    beside = tokenizer_beside(path) if tokenizer is None else Path(tokenizer)
    return {
        "encoder": file_marks(model_path(path)),
        "tokenizer": [] if beside is None else file_marks(beside),
    }


def _manner(device: torch.device, dtype: torch.dtype, options: EncodeOptions) -> dict[str, object]:
    """Return what else decides the bits; where the weights live does not."""
    return {
        "device": device.type,
        "dtype": str(dtype),
        "embeds_dtype": str(options.dtype or dtype),
        "max_length": options.max_length,
    }


def _keep(cache: EmbedsCache | None, key: str, embeds: Tensor) -> None:
    """Cache ``embeds``; a folder that cannot be written to costs time in the next run, not this one."""
    assert cache is not None
    try:
        cache.put(key, embeds)
    except WriteError as error:
        _log.warning("the embeds of a prompt are not cached: %s", error)
