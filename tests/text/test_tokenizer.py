"""Prompts become the token ids that transformers gives, from a vocabulary we read ourselves."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from transformers import T5TokenizerFast

from lowmem_core.errors import CheckpointError
from lowmem_core.text.spiece import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Piece, Spiece, parse_spiece
from lowmem_core.text.tokenizer import clean_prompt, open_tokenizer, spiece_tokenizer
from lowmem_core.tiny import UMT5_KINDS
from lowmem_core.tiny.umt5_vocabulary import spiece_bytes, tiny_spiece

Written = Callable[[str, torch.dtype], Path]
LENGTH = 24
PROMPTS = (
    "a red boat on the sea, slow motion",
    "",
    "cats &amp;amp; waves &lt;white&gt;",
    "caf\u00e9 \u6d77\u732b \u2026 \U0001f30a  \t two\u00a0 spaces\n",
    "the cat with the white boat " * 20,
)
TEXTS = (*PROMPTS, " lead", "trail  ", "a<extra_id_0>b </s> <unk> <pad> c", "\u200bzero\u200b width", "\uff21\uff22")


@pytest.mark.parametrize("text", [*TEXTS, "\x1c kept \x1f", "&amp;amp;lt;", "a\u3000b\u2028c"])
def test_prompts_are_cleaned_as_diffusers_cleans_them(text: str) -> None:
    """Entities, twice; white space as the regex package sees it."""
    assert clean_prompt(text) == prompt_clean(text)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", UMT5_KINDS)
def test_ids_are_those_of_transformers(kind: str, text: str, written: Written) -> None:
    """Whichever form the vocabulary is in."""
    reference = T5TokenizerFast.from_pretrained(written("diffusers", torch.float32) / "tokenizer")
    settings = {"padding": "max_length", "max_length": LENGTH, "truncation": True, "return_tensors": "pt"}
    want = reference([prompt_clean(text)], **settings)
    path = written(kind, torch.float32)
    got = open_tokenizer(path.parent / "google" / "umt5-xxl" if kind == "original" else path).tokens(text, LENGTH)
    assert torch.equal(got.ids, want["input_ids"])
    assert torch.equal(got.mask, want["attention_mask"])


def test_a_trained_vocabulary_gives_the_ids_of_sentencepiece() -> None:
    """With a real table of characters, and ids of SentencePiece's own code."""
    sentencepiece = pytest.importorskip("sentencepiece")
    raw = io.BytesIO()
    lines = [f"the {a} cat {b} sees a caf\u00e9 \u6d77 {a}{b}" for a in "abcdefgh" for b in "qrstuvwx"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=raw,
        vocab_size=60,
        hard_vocab_limit=False,
        model_type="unigram",
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        pad_piece="<pad>",
        minloglevel=2,
    )
    spiece = parse_spiece(raw.getvalue(), "x")
    assert spiece.charsmap
    processor = sentencepiece.SentencePieceProcessor(model_proto=raw.getvalue())
    tokenizer = spiece_tokenizer(spiece, "x")
    for text in (*PROMPTS, "\uff21\uff22 caf\u00e9", "cafe\u0301 \u2460", "\u200bzero\u200b width"):
        tokens = tokenizer.tokens(text, 512)
        want = processor.encode(clean_prompt(text))
        assert tokens.ids[0, : tokens.length].tolist() == [*want[:511], 1]


def test_the_vocabulary_survives_its_bytes() -> None:
    """Kinds, scores and texts, and the table of characters."""
    spiece = Spiece(tiny_spiece().pieces, b"\x00table\xff")
    assert parse_spiece(spiece_bytes(spiece), "x") == spiece
    assert {piece.kind for piece in spiece.pieces} == {NORMAL, UNKNOWN, CONTROL, USER_DEFINED}
    assert [piece.text for piece in spiece.pieces[:3]] == ["<pad>", "</s>", "<unk>"]


def test_bytes_that_end_early_are_refused() -> None:
    """A cut inside a field is damage; between two it gives a shorter vocabulary, and never another error."""
    raw, whole = spiece_bytes(tiny_spiece()), tiny_spiece().pieces
    refused = 0
    for length in range(len(raw)):
        try:
            pieces = parse_spiece(raw[:length], "x").pieces
        except CheckpointError:
            refused += 1
        else:
            assert pieces == whole[: len(pieces)]
    assert refused > 0.8 * len(raw)


@pytest.mark.parametrize("raw", [b"", b"\xff" * 20, b"\x0a", b"\x0b\x00", b"\x0a\x02\x0a\x05", b"\x08\x01"])
def test_what_is_no_vocabulary_is_refused(raw: bytes) -> None:
    """Numbers without end, lengths beyond the end, unknown forms, a number where a message belongs."""
    with pytest.raises(CheckpointError, match="the tokenizer in x is"):
        parse_spiece(raw, "x")


def test_another_type_of_model_is_refused() -> None:
    """A BPE vocabulary has the same form and would give other ids."""
    raw = spiece_bytes(tiny_spiece()) + b"\x12\x02\x18\x02"
    with pytest.raises(CheckpointError, match="model type 2"):
        parse_spiece(raw, "x")


def test_a_vocabulary_without_padding_is_refused() -> None:
    """Llama's has none, for example."""
    pieces = (Piece("<unk>", 0.0, UNKNOWN), Piece("a", -1.0, NORMAL))
    with pytest.raises(CheckpointError, match="need the pieces <pad> and </s>"):
        spiece_tokenizer(Spiece(pieces), "x")


def test_a_damaged_table_of_characters_is_refused() -> None:
    """The tokenizers package raises plain exceptions."""
    with pytest.raises(CheckpointError, match="damaged"):
        spiece_tokenizer(Spiece(tiny_spiece().pieces, b"\xff\xff\xff\xff"), "x")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """The message says which files would do."""
    with pytest.raises(CheckpointError, match=r"need tokenizer\.json or spiece\.model"):
        open_tokenizer(tmp_path)


def test_a_damaged_tokenizer_json_is_refused(tmp_path: Path) -> None:
    """Whatever transformers says about it is passed on."""
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 3}))
    with pytest.raises(CheckpointError, match="cannot read the tokenizer"):
        open_tokenizer(tmp_path)


def test_each_file_of_a_folder_can_be_given_itself(written: Written) -> None:
    """The ids are the same."""
    folder = written("diffusers", torch.float32) / "tokenizer"
    paths = (folder, folder.parent, folder / "tokenizer.json", folder / "spiece.model")
    found = [open_tokenizer(path).tokens(PROMPTS[0], LENGTH).ids.tolist() for path in paths]
    assert found == [found[0]] * len(paths)
