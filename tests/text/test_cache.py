"""A prompt is encoded once: what was cached has the same bits, and whatever is wrong with an entry costs only time."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowmem_core.errors import CheckpointError, RequestError, WriteError
from lowmem_core.text import EmbedsCache, EncodeOptions, embed_prompts, prompts
from lowmem_core.tiny import write_tiny_umt5

OPTIONS = EncodeOptions(8)
EMBEDS = torch.arange(64.0).view(1, 8, 8)
_WRITER = """
import sys, torch
from lowmem_core.text import EmbedsCache
cache = EmbedsCache(sys.argv[1], 20_000)
for turn in range(60):
    key = f"k{turn % 7}"
    found = cache.get(key)
    assert found is None or torch.equal(found, torch.full((1, 8, 64), float(turn % 7))), found
    cache.put(key, torch.full((1, 8, 64), float(turn % 7)))
"""


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by each text that is really encoded."""
    texts: list[str] = []
    real: Callable[..., list[Tensor]] = prompts.encode_prompts

    def recording(given: list[str], *arguments: object) -> list[Tensor]:
        texts.extend(given)
        return real(given, *arguments)

    monkeypatch.setattr(prompts, "encode_prompts", recording)
    return texts


def entries(folder: Path) -> list[Path]:
    """Return the files of a cache, the one that was used last at the end."""
    return sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)


def test_a_known_prompt_is_not_encoded_again(tmp_path: Path, encoded: list[str]) -> None:
    """Nor is anything loaded; a new one is encoded alone; the bits are the same."""
    path, cache = write_tiny_umt5(tmp_path / "m"), EmbedsCache(tmp_path / "c")
    first = embed_prompts(["a cat", ""], path, "cpu", options=OPTIONS, cache=cache)
    second = embed_prompts(["the sea", "a cat", ""], path, "cpu", options=OPTIONS, cache=cache)
    assert encoded == ["a cat", "", "the sea"]
    assert torch.equal(second[1], first[0])
    assert torch.equal(second[2], first[1])
    assert torch.equal(second[0], embed_prompts(["the sea"], path, "cpu", options=OPTIONS)[0])


def test_equal_prompts_are_encoded_once(tmp_path: Path, encoded: list[str]) -> None:
    """Also those that are equal after cleaning, and without a cache."""
    path = write_tiny_umt5(tmp_path)
    a, b, c = embed_prompts(["a cat", " a  cat ", "a cat"], path, "cpu", options=OPTIONS)
    assert encoded == ["a cat"]
    assert torch.equal(a, b)
    assert torch.equal(a, c)


def test_a_prompt_is_cleaned_once(tmp_path: Path) -> None:
    """Cleaning twice would unfold entities that diffusers leaves."""
    path = write_tiny_umt5(tmp_path)
    (folded,) = embed_prompts(["&amp;amp;lt;"], path, "cpu", options=OPTIONS)
    (plain,) = embed_prompts(["<"], path, "cpu", options=OPTIONS)
    assert not torch.equal(folded, plain)


def test_no_cache_keeps_nothing(tmp_path: Path, encoded: list[str]) -> None:
    """The opt-out."""
    path = write_tiny_umt5(tmp_path)
    for _ in range(2):
        embed_prompts(["a cat"], path, "cpu", options=OPTIONS)
    assert encoded == ["a cat", "a cat"]
    assert list(tmp_path.iterdir()) == [path]


def test_no_prompts_need_no_encoder(tmp_path: Path) -> None:
    """Not even its file."""
    assert embed_prompts([], tmp_path / "none", "cpu", cache=EmbedsCache(tmp_path)) == []


@pytest.mark.parametrize("what", ["length", "dtype", "embeds dtype", "encoder", "tokenizer", "given tokenizer"])
def test_whatever_changes_the_bits_changes_the_entry(what: str, tmp_path: Path, encoded: list[str]) -> None:
    """Settings, and files that are replaced under the same name."""
    path, cache = write_tiny_umt5(tmp_path / "m", "original"), EmbedsCache(tmp_path / "c")
    arguments: dict[str, object] = {"options": OPTIONS, "cache": cache}
    embed_prompts(["a cat"], path, "cpu", **arguments)
    if what == "length":
        arguments["options"] = EncodeOptions(9)
    elif what == "embeds dtype":
        arguments["options"] = EncodeOptions(8, torch.float16)
    elif what == "dtype":
        arguments["dtype"] = torch.float32
    elif what == "encoder":
        write_tiny_umt5(tmp_path / "m", "original", seed=1)
    elif what == "tokenizer":
        os.utime(tmp_path / "m" / "google" / "umt5-xxl" / "spiece.model", ns=(5, 5))
    else:
        arguments["tokenizer"] = tmp_path / "m" / "google" / "umt5-xxl" / "spiece.model"
    embed_prompts(["a cat"], path, "cpu", **arguments)
    assert encoded == ["a cat", "a cat"]


def test_where_the_weights_live_does_not_change_the_entry(tmp_path: Path, encoded: list[str]) -> None:
    """Streamed or resident, from disk or from memory: the bits are the same."""
    path, cache = write_tiny_umt5(tmp_path / "m"), EmbedsCache(tmp_path / "c")
    embed_prompts(["a cat"], path, "cpu", options=OPTIONS, cache=cache)
    embed_prompts(["a cat"], path, "cpu", options=EncodeOptions(8, limit_bytes=None), cache=cache, from_disk=False)
    assert encoded == ["a cat"]


@pytest.mark.parametrize("damage", ["cut", "bits", "empty", "other"])
def test_a_damaged_entry_is_ignored_and_replaced(
    damage: str, tmp_path: Path, encoded: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """With a warning that names it."""
    path, cache = write_tiny_umt5(tmp_path / "m"), EmbedsCache(tmp_path / "c")
    (want,) = embed_prompts(["a cat"], path, "cpu", options=OPTIONS, cache=cache)
    (entry,) = entries(cache.folder)
    raw = entry.read_bytes()
    broken = {"cut": raw[:-9], "bits": raw[:-2] + bytes([raw[-2] ^ 1, raw[-1]]), "empty": b"", "other": b"text" * 9}
    entry.write_bytes(broken[damage])
    with caplog.at_level(logging.WARNING, "lowmem"):
        (got,) = embed_prompts(["a cat"], path, "cpu", options=OPTIONS, cache=cache)
    assert torch.equal(got, want)
    assert encoded == ["a cat", "a cat"]
    assert entry.name in caplog.text
    assert entry.read_bytes() == raw


def test_the_least_recently_used_entries_go_first(tmp_path: Path) -> None:
    """What was read lately stays, and the folder never passes its limit."""
    for number, key in enumerate("abc"):
        EmbedsCache(tmp_path).put(key, EMBEDS)
        os.utime(entries(tmp_path)[-1], ns=(number, number))
    size = max(path.stat().st_size for path in tmp_path.iterdir())
    cache = EmbedsCache(tmp_path, 3 * size)
    for number, path in enumerate(sorted(tmp_path.iterdir())):
        os.utime(path, ns=(number, number))
    assert cache.get("a") is not None
    cache.put("d", EMBEDS)
    assert [path.name[0] for path in sorted(tmp_path.iterdir())] == ["a", "c", "d"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= cache.cap_bytes


def test_an_entry_larger_than_the_limit_is_not_kept(tmp_path: Path) -> None:
    """The limit is a limit."""
    cache = EmbedsCache(tmp_path, 100)
    cache.put("a", EMBEDS)
    assert entries(tmp_path) == []
    assert cache.get("a") is None


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    """Once it is old; a younger one may still be written to."""
    old, young = tmp_path / ".writing-old", tmp_path / ".writing-young"
    old.write_bytes(b"x")
    young.write_bytes(b"x")
    os.utime(old, (1, 1))
    EmbedsCache(tmp_path).put("a", EMBEDS)
    assert not old.exists()
    assert young.exists()


def test_a_folder_that_cannot_be_written_to_costs_no_prompt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The embeds are given, with a warning; the cache itself raises."""
    (tmp_path / "file").write_bytes(b"")
    path, cache = write_tiny_umt5(tmp_path / "m"), EmbedsCache(tmp_path / "file")
    with caplog.at_level(logging.WARNING, "lowmem"):
        (embeds,) = embed_prompts(["a cat"], path, "cpu", options=OPTIONS, cache=cache)
    assert embeds.any()
    assert "not cached" in caplog.text
    with pytest.raises(WriteError):
        cache.put("a", EMBEDS)


def test_cached_embeds_outlive_their_entry(tmp_path: Path) -> None:
    """An entry that is replaced or removed does not change what was read from it."""
    cache = EmbedsCache(tmp_path)
    cache.put("a", EMBEDS)
    found = cache.get("a")
    (entry,) = entries(tmp_path)
    entry.write_bytes(bytes(entry.stat().st_size))
    assert found is not None
    assert torch.equal(found, EMBEDS)


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    """Each reads whole entries or none, while both write and remove."""
    command = [sys.executable, "-c", _WRITER, str(tmp_path)]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 20_000


@pytest.mark.parametrize("cap", [0, -1])
def test_a_limit_that_holds_nothing_is_refused(cap: int, tmp_path: Path) -> None:
    """Pass None for no cache."""
    with pytest.raises(RequestError, match="must be positive"):
        EmbedsCache(tmp_path, cap)


def test_a_missing_encoder_is_refused(tmp_path: Path) -> None:
    """With and without a cache."""
    with pytest.raises(RequestError, match="cannot look at a model file"):
        embed_prompts(["a"], tmp_path / "x.safetensors", "cpu", cache=EmbedsCache(tmp_path))
    with pytest.raises(CheckpointError, match="there is no file"):
        embed_prompts(["a"], tmp_path / "x.safetensors", "cpu")
