"""``lowmem wan``, ``compare`` and ``runs``, run as their user runs them, on the tiny checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from lowmem_core.cli import main
from lowmem_core.load.latents import read_latents
from lowmem_core.write import probe_video

SIZE = ["--size", "64x32", "--frames", "5", "--steps", "2", "--seed", "3", "--device", "cpu", "--json"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the tiny files, embeds and a picture once."""
    folder = tmp_path_factory.mktemp("tiny")
    assert main(["tiny", "--out", str(folder)]) == 0
    generator = torch.Generator().manual_seed(0)
    embeds = {name: torch.randn(1, 12, 32, generator=generator) for name in ("prompt_embeds", "negative_prompt_embeds")}
    save_file(embeds, folder / "embeds.safetensors")
    pixels = torch.randint(0, 255, (40, 90, 3), dtype=torch.uint8, generator=generator)
    Image.fromarray(pixels.numpy()).save(folder / "picture.png")
    return folder


def words(tiny: Path, model: str, *more: str, vae: str = "wan_2.1_vae_tiny") -> list[str]:
    """Return the arguments that name the files."""
    files = ["--model", str(tiny / f"{model}.safetensors"), "--vae", str(tiny / f"{vae}.safetensors")]
    return [*files, "--embeds", str(tiny / "embeds.safetensors"), *SIZE, *more]


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command that must succeed and return its JSON."""
    capsys.readouterr()
    assert main(arguments) == 0
    return json.loads(capsys.readouterr().out)


def test_text_to_video(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The video is what was asked for, and the JSON says what was planned and measured."""
    out, latents = tmp_path / "a.mp4", tmp_path / "a.latent"
    places = ["--out", str(out), "--latents-out", str(latents), "--runs-folder", str(tmp_path / "runs")]
    facts = run(["wan", *words(tiny, "wan2.1_t2v_tiny", *places)], capsys)
    video = probe_video(out)
    assert (video.frames, video.height, video.width) == (5, 32, 64)
    assert read_latents(latents).shape == (1, 16, 2, 4, 8)
    assert len(facts["steps_s"]) == 2
    assert facts["measured_peak_bytes"] <= facts["planned_peak_bytes"]
    assert (facts["measured_by"], facts["streamed_bytes"]) == ("live-storage", 0)
    assert len(facts["latents_sha256"]) == len(facts["rgb_sha256"]) == 64
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("kind", ["t2v", "i2v", "ti2v"])
def test_compare_says_that_modes_agree(kind: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two experts, images and TI2V: the same latents in every mode, with fewer bytes when streamed."""
    if kind == "ti2v":
        more = words(tiny, "wan2.2_ti2v_tiny", "--image", str(tiny / "picture.png"), vae="wan2.2_vae_tiny")
    else:
        low = ["--low", str(tiny / f"wan2.2_{kind}_low_noise_tiny.safetensors"), "--guidance-low", "3"]
        image = ["--image", str(tiny / "picture.png")] if kind == "i2v" else []
        more = words(tiny, f"wan2.2_{kind}_high_noise_tiny", *low, *image)
    rows = run(["compare", "wan", *more], capsys)
    assert [row["memory_mode"] for row in rows] == ["resident", "stream"]
    assert all(row["identical"] for row in rows)
    assert all(row["measured_peak_bytes"] <= row["planned_peak_bytes"] for row in rows)


def test_compare_prints_a_table_and_what_does_not_fit(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mode that is refused is a row with its reason, not the end."""
    arguments = [word for word in words(tiny, "wan2.1_t2v_tiny", "--device-budget", "15MiB") if word != "--json"]
    assert main(["compare", "wan", *arguments]) == 0
    text = capsys.readouterr().out
    assert "resident  the model does not fit on the device as a whole" in text
    assert "stream" in text
    assert "yes" in text


def test_a_decode_that_fails_costs_no_steps(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run is listed, the same command goes on after its last step, and then it is gone."""
    runs = ["--runs-folder", str(tmp_path / "runs")]
    (tmp_path / "folder.mp4").mkdir()
    command = ["wan", *words(tiny, "wan2.1_t2v_tiny", *runs)]
    assert main([*command, "--out", str(tmp_path / "folder.mp4")]) == 1
    capsys.readouterr()
    assert main(["runs", *runs]) == 0
    assert "step 2 of 2" in capsys.readouterr().out
    assert run([*command, "--out", str(tmp_path / "b.mp4")], capsys)["steps_s"] == []
    assert main(["runs", *runs]) == 0
    assert "no unfinished runs" in capsys.readouterr().out


def test_runs_can_be_removed(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By name or all of them; a wrong name is explained."""
    runs = ["--runs-folder", str(tmp_path / "runs")]
    (tmp_path / "folder.mp4").mkdir()
    for seed in ("1", "2"):
        arguments = words(tiny, "wan2.1_t2v_tiny", *runs, "--seed", seed, "--out", str(tmp_path / "folder.mp4"))
        assert main(["wan", *arguments]) == 1
    capsys.readouterr()
    main(["runs", *runs])
    name = capsys.readouterr().out.split()[0]
    assert main(["runs", *runs, "--remove", name]) == 0
    assert main(["runs", *runs, "--remove", name]) == 1
    assert main(["runs", *runs, "--remove", "../x"]) == 1
    assert "a name from the list" in capsys.readouterr().err
    assert main(["runs", *runs, "--remove", "all"]) == 0
    assert list((tmp_path / "runs").iterdir()) == []


BAD = {
    "frames": (["--frames", "6"], "Use 5 or 9 frames"),
    "size": (["--size", "70x32"], "Use 64x32"),
    "size text": (["--size", "big"], "WIDTHxHEIGHT"),
    "budget": (["--device-budget", "1MiB"], 'Use memory mode "stream"'),
    "streamed budget": (["--device-budget", "1MiB", "--memory-mode", "stream"], "even streamed; need"),
    "boundary": (["--boundary", "3"], "boundary"),
    "missing file": (["--model", "nothing.safetensors"], "nothing.safetensors"),
    "a VAE as model": (["--model", "wan_2.1_vae_tiny.safetensors"], "holds no Wan transformer"),
    "picture": (["--image", "embeds.safetensors"], "cannot read the picture"),
    "last frame alone": (["--last-image", "picture.png"], "needs a first one"),
    "an image for a text model": (["--image", "picture.png"], "do not belong together"),
    "lora": (["--lora", "none.safetensors:0.5"], "none.safetensors"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_work_is_explained(
    name: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line on stderr says what is needed; nothing is written."""
    monkeypatch.chdir(tiny)
    extra, message = BAD[name]
    out = tmp_path / "a.mp4"
    runs = ["--runs-folder", str(tmp_path / "runs")]
    assert main(["wan", *words(tiny, "wan2.1_t2v_tiny", "--out", str(out), *runs, *extra)]) == 1
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_a_prompt_is_needed(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without embeds and without a text encoder the error names both."""
    arguments = words(tiny, "wan2.1_t2v_tiny", "--out", str(tmp_path / "a.mp4"))
    at = arguments.index("--embeds")
    assert main(["wan", *arguments[:at], *arguments[at + 2 :]]) == 1
    assert "--embeds" in capsys.readouterr().err


def prompted(tiny: Path, *more: str) -> list[str]:
    """Return the arguments with a prompt and a text encoder in place of embeds."""
    arguments = words(tiny, "wan2.1_t2v_tiny", *more)
    at = arguments.index("--embeds")
    arguments[at : at + 2] = ["--prompt", "a cat", "--text-encoder", str(tiny / "umt5_tiny.safetensors")]
    return arguments


def test_a_prompt_is_encoded_once_and_then_known(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both prompts are kept in the user's cache folder, give the same latents again, and can be left out of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ["wan", *prompted(tiny, "--negative", "blurry", "--out", str(tmp_path / "a.mp4"))]
    first = run([*arguments, "--no-embeds-cache"], capsys)["latents_sha256"]
    assert not (tmp_path / "lowmem" / "embeds").exists()
    assert run(arguments, capsys)["latents_sha256"] == first
    assert len(list((tmp_path / "lowmem" / "embeds").iterdir())) == 2
    assert run(arguments, capsys)["latents_sha256"] == first
    assert run([*arguments, "--prompt", "a dog"], capsys)["latents_sha256"] != first


def test_a_prompt_and_embeds_exclude_each_other(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a prompt needs an encoder."""
    out = ["--out", str(tmp_path / "a.mp4")]
    assert main(["wan", *prompted(tiny, *out), "--embeds", str(tiny / "embeds.safetensors")]) == 1
    assert "have --embeds, --prompt, --text-encoder" in capsys.readouterr().err
    arguments = prompted(tiny, *out)
    at = arguments.index("--text-encoder")
    assert main(["wan", *arguments[:at], *arguments[at + 2 :]]) == 1
    assert "--text-encoder FILE" in capsys.readouterr().err


def test_loras_on_both_experts(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each changes the video, in every mode alike; a strength of 0 is no LoRA."""
    low = ["--low", str(tiny / "wan2.2_t2v_low_noise_tiny.safetensors"), "--steps", "4"]
    ours = [
        ["--lora", f"{tiny / 'wan2.2_t2v_high_noise_lora_tiny.safetensors'}:0.7"],
        ["--lora-low", f"{tiny / 'wan2.2_t2v_low_noise_lora_tiny.safetensors'}"],
        ["--lora", f"{tiny / 'wan2.2_t2v_high_noise_lora_tiny.safetensors'}:0"],
    ]
    found = []
    for loras in ([], ours[0], ours[0] + ours[1], ours[2]):
        rows = run(["compare", "wan", *words(tiny, "wan2.2_t2v_high_noise_tiny", *low, *loras)], capsys)
        assert all(row["identical"] for row in rows)
        assert all(row["measured_peak_bytes"] <= row["planned_peak_bytes"] for row in rows)
        found.append(rows[0]["latents_sha256"])
    assert found[0] == found[3]
    assert len(set(found)) == 3


def test_saving_can_be_turned_off(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that failed at its end leaves nothing then."""
    (tmp_path / "folder.mp4").mkdir()
    runs = ["--runs-folder", str(tmp_path / "runs"), "--no-save"]
    assert main(["wan", *words(tiny, "wan2.1_t2v_tiny", *runs, "--out", str(tmp_path / "folder.mp4"))]) == 1
    assert not (tmp_path / "runs").exists()
