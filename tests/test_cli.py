"""The ``lowmem`` command, run as its user runs it, on the tiny checkpoints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from torch import Tensor

from lowmem_core.cli import main
from lowmem_core.decode.stream import LatentFrameDecoder
from lowmem_core.write import probe_video


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Write the tiny files once; return the arguments that name them."""
    folder = tmp_path_factory.mktemp("tiny")
    assert main(["tiny", "--out", str(folder)]) == 0
    latents = next(folder.glob("wan_2.1*.latent"))
    return ["--vae", str(folder / "wan_2.1_vae_tiny.safetensors"), "--latents", str(latents)]


def test_decode_compares_with_the_plain_decode(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One JSON object on stdout holds size, bytes, digest and the comparison, and the file is what it says."""
    out = tmp_path / "a.mp4"
    assert main(["decode", *tiny, "--out", str(out), "--tile", "off", "--compare", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    video = probe_video(out)
    assert (facts["frames"], facts["height"], facts["width"]) == (video.frames, video.height, video.width)
    assert facts["equal_to_reference"]
    assert (facts["max_abs_diff"], facts["uint8_mismatch_fraction"]) == (0.0, 0.0)
    assert facts["measured_by"] == "live-storage"
    assert facts["measured_peak_bytes"] <= facts["planned_peak_bytes"]


def test_the_digest_does_not_depend_on_the_budget(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A budget that sends the caches to host memory keeps the pixels and is kept."""
    digests, peaks = [], []
    for budget in ([], ["--device-budget", "40MiB"]):
        assert main(["decode", *tiny, "--out", str(tmp_path / "b.mp4"), "--json", *budget]) == 0
        facts = json.loads(capsys.readouterr().out)
        digests.append(facts["rgb_sha256"])
        peaks.append(facts["measured_peak_bytes"])
    assert digests[0] == digests[1]
    assert peaks[1] <= 40 * 2**20


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (["--fps", "0"], "frame rate"),
        (["--tile", "none"], "tiling"),
        (["--device-budget", "1KiB"], "at least"),
        (["--device-budget", "lots"], "byte quantity"),
    ],
)
def test_what_cannot_work_is_explained_and_leaves_no_file(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], text: str
) -> None:
    """Exit status 1, a reason on stderr, nothing on disk."""
    assert main(["decode", *tiny, "--out", str(tmp_path / "c.mp4"), *extra]) == 1
    assert text in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("extra", "kept"), [([], ["d.partial.mp4"]), (["--discard-partial"], [])], ids=["keep", "discard"]
)
def test_a_stopped_decode_keeps_its_part_unless_told(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: list[str], kept: list[str]
) -> None:
    """Ctrl-C half way leaves the playable part, or nothing."""
    original = LatentFrameDecoder.decode

    def stop_at_the_last(self: LatentFrameDecoder, latent: Tensor, index: int, count: int) -> Tensor:
        if index == count - 1:
            raise KeyboardInterrupt
        return original(self, latent, index, count)

    monkeypatch.setattr(LatentFrameDecoder, "decode", stop_at_the_last)
    assert main(["decode", *tiny, "--out", str(tmp_path / "d.mp4"), *extra]) == 130
    assert [path.name for path in tmp_path.iterdir()] == kept


def test_the_demo_shows_tiles_and_how_exact_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two playable videos with the memory table of each, one of them in tiles, and the difference of the two."""
    assert main(["demo", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "live-storage" in printed
    assert "stages 1x1, 3x2" in printed
    assert float(re.search(r"largest difference (\S+) of 2", printed)[1]) <= 4e-6
    assert str(tmp_path / "demo_tiles.mp4") in printed
    assert [probe_video(tmp_path / f"demo_{name}.mp4").frames for name in ("whole", "tiles")] == [9, 9]


def test_tiny_files_for_a_folder_that_is_not_comfyui(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names what is missing."""
    assert main(["tiny", "--comfyui", str(tmp_path)]) == 1
    assert "models" in capsys.readouterr().err
