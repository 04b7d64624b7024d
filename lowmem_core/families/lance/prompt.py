"""A prompt as Lance reads it: the system text, the prompt and the tail, each tokenised by itself.

The reference renders one text and then looks for the prompt's tokens in it, which fails for prompts that begin with a
new line, hold a special token or occur in the system text. The parts by themselves give the same ids for ordinary
prompts, and give every other prompt as the plain text that it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import CheckpointError
from .prefix import Segment

SYSTEM_TEXT = (
    "<|im_start|>system\nDescribe the image by detailing the color, quantity, text, shape, size, texture, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
TAIL_TEXT = "<|im_end|>\n<|im_start|>assistant\n"
_SPECIAL = ("<|im_start|>", "<|im_end|>")


class PromptIds(NamedTuple):
    """Token ids of a prompt.

    Attributes:
        system: ``[s]`` int64: what comes before it.
        prompt: ``[c]`` int64; empty for an empty prompt.
        tail: ``[a]`` int64: what comes after it.
    """

    system: Tensor
    prompt: Tensor
    tail: Tensor


@dataclass(frozen=True)
class LanceTokenizer:
    """Turns prompts into token ids.

    Attributes:
        backend: A Qwen2 tokenizer of transformers.
    """

    backend: Any

    @classmethod
    def open(cls, folder: Path) -> LanceTokenizer:
        """Open the tokenizer in a model folder.

        Raises:
            CheckpointError: It is missing, damaged or of another model.
        """
        from transformers import Qwen2TokenizerFast

        if not (folder / "tokenizer.json").is_file() and not (folder / "vocab.json").is_file():
            raise CheckpointError(
                f"there is no tokenizer in {folder}",
                need="tokenizer.json, or vocab.json and merges.txt, with tokenizer_config.json",
                remedy="Put the tokenizer's files of the download beside the weights.",
            )
        try:
            backend = Qwen2TokenizerFast.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # whatever transformers stumbles over first
            raise CheckpointError(
                f"cannot read the tokenizer in {folder}", have=str(error), remedy="Download it again."
            ) from error
        lost = [token for token in _SPECIAL if len(backend(token, add_special_tokens=False)["input_ids"]) != 1]
        if lost:
            raise CheckpointError(
                f"the tokenizer in {folder} is not that of Lance",
                need=" and ".join(_SPECIAL) + " as one token each",
                have=f"several for {' and '.join(lost)}",
                remedy="Use the tokenizer that came with the model, tokenizer_config.json included.",
            )
        return cls(backend)

    def ids(self, prompt: str) -> PromptIds:
        """Return the ids of a prompt; names of special tokens in it are plain text."""
        plain = self._ids(prompt, split_special_tokens=True) if prompt else []
        parts = (self._ids(SYSTEM_TEXT), plain, self._ids(TAIL_TEXT))
        return PromptIds(*(torch.tensor(found, dtype=torch.int64) for found in parts))

    def _ids(self, text: str, **how: bool) -> list[int]:
        found: list[int] = self.backend(text, add_special_tokens=False, **how)["input_ids"]
        return found


class Reading(NamedTuple):
    """What is read before an image is made.

    Attributes:
        segments: In order.
        conditional: Indices of those the conditional side looks back on.
        unconditional: Likewise without the prompt. The tail keeps the place that it has behind the prompt.
    """

    segments: tuple[Segment, ...]
    conditional: tuple[int, ...]
    unconditional: tuple[int, ...]


def reading_of(ids: PromptIds, embeds: Callable[[Tensor], Tensor]) -> Reading:
    """Return what to read for a prompt.

    Args:
        ids: Of the prompt.
        embeds: Returns ``[n, D]`` for ids ``[n]``, on the device that computes.
    """
    if not len(ids.prompt):
        whole = Segment(embeds(torch.cat([ids.system, ids.tail])), 0)
        return Reading((whole,), (0,), (0,))
    after_system = len(ids.system)
    after_prompt = after_system + len(ids.prompt)
    system = Segment(embeds(ids.system), 0)
    prompt = Segment(embeds(ids.prompt), after_system, (0,))
    tail = embeds(ids.tail)
    segments = (system, prompt, Segment(tail, after_prompt, (0, 1)), Segment(tail, after_prompt, (0,)))
    return Reading(segments, (0, 1, 2), (0, 3))
