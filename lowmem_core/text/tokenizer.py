"""From prompts to token ids, as diffusers' ``WanPipeline`` does it, from files alone."""

from __future__ import annotations

import html
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..load.rows import read_rows
from ..weights import Checkpoint
from .spiece import CONTROL, UNKNOWN, USER_DEFINED, Spiece, parse_spiece

SPIECE_TENSOR = "spiece_model"
TOKENIZER_FILES = ("tokenizer.json", "spiece.model")
_SPACE = "\u2581"
_PAD, _END = "<pad>", "</s>"
_ADDED_KINDS = (CONTROL, UNKNOWN, USER_DEFINED)
# What the regex package, which diffusers uses, takes for white space; the standard library adds U+001C to U+001F.
_WHITE_SPACE = re.compile(r"[^\S\x1c-\x1f]+")
_REMEDY = (
    "Give a tokenizer: a folder with tokenizer.json or spiece.model, or a text encoder file of ComfyUI, "
    "which carries its own. Or encode elsewhere and give the embeds as a file."
)


class PromptTokens(NamedTuple):
    """A prompt as the encoder wants it.

    Attributes:
        ids: ``[1, L]`` int64 on the CPU, padded.
        mask: ``[1, L]`` int64 on the CPU: 1 for tokens, 0 for padding.
    """

    ids: Tensor
    mask: Tensor

    @property
    def length(self) -> int:
        """How many tokens there are."""
        return int(self.mask.gt(0).sum())


@dataclass(frozen=True)
class PromptTokenizer:
    """Turns prompts into token ids.

    Attributes:
        backend: A tokenizer of transformers.
        source: The path, for messages.
    """

    backend: Any
    source: str

    def tokens(self, text: str, max_length: int) -> PromptTokens:
        """Return the tokens of a cleaned prompt, cut and padded to ``max_length``."""
        found = self.backend(
            [clean_prompt(text)],
            padding="max_length",
            max_length=max_length,
            truncation=True,
            add_special_tokens=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        return PromptTokens(found["input_ids"].to(torch.int64), found["attention_mask"].to(torch.int64))


def clean_prompt(text: str) -> str:
    """Return ``text`` as diffusers' Wan pipelines clean it.

    Broken characters are repaired where the package ftfy is installed, as diffusers does.
    """
    if importlib.util.find_spec("ftfy") is not None:
        text = importlib.import_module("ftfy").fix_text(text)
    text = html.unescape(html.unescape(text)).strip()
    return _WHITE_SPACE.sub(" ", text).strip()


def open_tokenizer(path: Path | str) -> PromptTokenizer:
    """Open a tokenizer.

    Args:
        path: A folder with ``tokenizer.json`` or ``spiece.model``, also in a ``tokenizer`` folder within; one of these
            files itself; or a text encoder file that carries a vocabulary.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    path = Path(path)
    if path.is_dir():
        for folder in (path, path / "tokenizer"):
            if (folder / "tokenizer.json").is_file():
                return _transformers_tokenizer(folder)
            if (folder / "spiece.model").is_file():
                return open_tokenizer(folder / "spiece.model")
        raise CheckpointError(
            f"there is no tokenizer in {path}", need="tokenizer.json or spiece.model", remedy="Check the path."
        )
    if path.name == "tokenizer.json" and path.is_file():
        return _transformers_tokenizer(path.parent)
    if path.suffix == ".model" and path.is_file():
        return spiece_tokenizer(parse_spiece(path.read_bytes(), str(path)), str(path))
    return embedded_tokenizer(Checkpoint.open(path))


def embedded_tokenizer(checkpoint: Checkpoint) -> PromptTokenizer:
    """Return the tokenizer that a text encoder file carries.

    Raises:
        CheckpointError: It carries none, or a damaged one.
    """
    if SPIECE_TENSOR not in checkpoint:
        raise CheckpointError(
            f"{checkpoint.source} carries no tokenizer", need=f"a tensor {SPIECE_TENSOR!r}", remedy=_REMEDY
        )
    info = checkpoint[SPIECE_TENSOR]
    if info.dtype not in ("U8", "I8") or len(info.shape) != 1 or not info.shape[0]:
        raise CheckpointError(
            f"the tokenizer in {checkpoint.source} is damaged",
            need="a row of bytes",
            have=str(info),
            remedy="Download the file again.",
        )
    raw = bytes(read_rows(checkpoint, SPIECE_TENSOR, torch.arange(info.shape[0])).view(torch.uint8).numpy())
    return spiece_tokenizer(parse_spiece(raw, checkpoint.source), checkpoint.source)


def spiece_tokenizer(spiece: Spiece, source: str) -> PromptTokenizer:
    """Return a tokenizer with the vocabulary ``spiece``.

    It gives the ids of the ``tokenizer.json`` that transformers makes of such a vocabulary: what is unknown becomes
    the unknown piece, not bytes.

    Raises:
        CheckpointError: The vocabulary has no padding or no end, or its table of characters is damaged.
    """
    from transformers import PreTrainedTokenizerFast

    known = {piece.text for piece in spiece.pieces}
    if not {_PAD, _END} <= known:
        raise CheckpointError(
            f"the tokenizer in {source} is not that of UMT5",
            need=f"the pieces {_PAD} and {_END}",
            have=f"{len(known)} others",
            remedy="Use the UMT5 text encoder of Wan.",
        )
    try:
        tokenizer = _unigram(spiece)
    except Exception as error:  # the tokenizers package raises plain exceptions for a bad vocabulary
        raise CheckpointError(f"the tokenizer in {source} is damaged", have=str(error)) from error
    unknown = spiece.pieces[spiece.unknown_id].text
    backend = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=_PAD, eos_token=_END, unk_token=unknown, padding_side="right"
    )
    return PromptTokenizer(backend, source)


def _unigram(spiece: Spiece) -> Any:
    """Return a tokenizer of the tokenizers package."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

    vocabulary = [(piece.text, piece.score) for piece in spiece.pieces]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=spiece.unknown_id, byte_fallback=False))
    steps: list[Any] = [normalizers.Precompiled(spiece.charsmap)] if spiece.charsmap else []
    steps += [normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), _SPACE)]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="always")
    tokenizer.add_tokens(
        [
            AddedToken(piece.text, normalized=False, special=piece.kind != USER_DEFINED)
            for piece in spiece.pieces
            if piece.kind in _ADDED_KINDS
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {_END}", special_tokens=[(_END, tokenizer.token_to_id(_END))]
    )
    return tokenizer


def _transformers_tokenizer(folder: Path) -> PromptTokenizer:
    """Return the tokenizer of a folder, of the class and with the settings that diffusers' pipeline gives it."""
    from transformers import T5TokenizerFast

    try:
        return PromptTokenizer(T5TokenizerFast.from_pretrained(str(folder), local_files_only=True), str(folder))
    except Exception as error:  # whatever transformers stumbles over first
        raise CheckpointError(
            f"cannot read the tokenizer in {folder}", have=str(error), remedy="Download it again."
        ) from error
