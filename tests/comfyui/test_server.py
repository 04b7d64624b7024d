"""The pack in a running ComfyUI server, driven through its HTTP interface as a script would."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import av
import pytest
import torch

RUN_S = 240.0
pytestmark = pytest.mark.timeout(900)  # a loaded machine takes minutes to start a server

WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}
EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "example_workflows").glob("*.json"))


def prompt_of(latent: str = "wan_2.1_tiny_128x96x5.latent", **changes: Any) -> dict[str, Any]:
    """Return the example workflow in API format, with changed widgets of the decode node."""
    decode = {
        "samples": ["1", 0],
        "vae": ["2", 0],
        "fps": 16.0,
        "codec": "h264",
        "crf": 18,
        "bit_depth": "8",
        "filename_prefix": "video/server",
        "destination": "output",
        "tiling": "auto",
        "tile_size": 256,
    }
    loader = {"vae_name": "wan_2.1_vae_tiny.safetensors", "dtype": "auto"}
    return {
        "1": {"class_type": "LoadLatent", "inputs": {"latent": latent}},
        "2": {"class_type": "LowmemWanVAELoader", "inputs": loader},
        "3": {"class_type": "LowmemWanStreamingDecode", "inputs": decode | changes},
    }


def has_extra_widget(spec: list[Any]) -> bool:
    """Return whether the page puts a second widget beside an input: what to do with a seed, a button to upload."""
    options = spec[1] if len(spec) > 1 else {}
    return bool(options.get("control_after_generate") or options.get("image_upload"))


def api_format(workflow: dict[str, Any], object_info: dict[str, Any]) -> dict[str, Any]:
    """Return a saved workflow as the page would send it: links by name, widgets by position."""
    sources = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    prompt = {}
    for node in workflow["nodes"]:
        info = object_info[node["type"]]["input"]
        specs = {**info["required"], **info.get("optional", {})}
        widgets = [name for name, spec in specs.items() if isinstance(spec[0], list) or spec[0] in WIDGETS]
        slots = [slot for name in widgets for slot in (name, *(["extra"] if has_extra_widget(specs[name]) else []))]
        assert len(slots) == len(node["widgets_values"]), node["type"]
        inputs = {name: value for name, value in zip(slots, node["widgets_values"], strict=True) if name != "extra"}
        inputs |= {slot["name"]: sources[slot["link"]] for slot in node["inputs"] if slot["link"]}
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt


def save_latent(path: Path, frames: int, side: int) -> None:
    """Write a random Wan latent as ComfyUI's Save Latent does."""
    from safetensors.torch import save_file

    tensors = {
        "latent_tensor": torch.randn(1, 16, frames, side, side),
        "latent_format_version_0": torch.tensor([0]),
    }
    save_file(tensors, path)


def test_the_pack_loads_without_complaint(server: Any) -> None:
    """No import failed, and no traceback passes through our files."""
    log = server.log.read_text(errors="replace")
    assert "IMPORT FAILED" not in log
    assert "custom_nodes/lowmem/" not in log
    assert "LowmemWanStreamingDecode" in server.call("/object_info")


def test_a_prompt_becomes_an_mp4(server: Any) -> None:
    """The history names the file, and the file plays and carries its workflow."""
    prompt = prompt_of()
    entry = server.finished(server.post(prompt))
    assert entry["status"]["status_str"] == "success", entry["status"]
    saved = entry["outputs"]["3"]["images"][0]
    with av.open(str(server.base / saved["type"] / saved["subfolder"] / saved["filename"])) as container:
        assert sum(1 for _ in container.decode(video=0)) % 4 == 1
        found = json.loads(container.metadata["prompt"])
        assert {key: node["inputs"] for key, node in found.items()} == {
            key: node["inputs"] for key, node in prompt.items()
        }
        assert json.loads(container.metadata["workflow"]) == {"nodes": []}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_workflows_run(server: Any, path: Path) -> None:
    """Every template runs as it is shipped, on the tiny checkpoint."""
    workflow = json.loads(path.read_text(encoding="utf-8"))
    entry = server.finished(server.post(api_format(workflow, server.call("/object_info"))))
    assert entry["status"]["status_str"] == "success", entry["status"]


def test_the_video_is_served_to_the_page(server: Any) -> None:
    """The preview can be played by the browser."""
    saved = server.finished(server.post(prompt_of(crf=19)))["outputs"]["3"]["images"][0]
    query = f"filename={saved['filename']}&subfolder={saved['subfolder']}&type={saved['type']}"
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/view?{query}", timeout=30) as answer:
        assert answer.headers["Content-Type"] == "video/mp4"


def test_other_video_nodes_take_the_output(server: Any) -> None:
    """Save Video copies the finished file."""
    prompt = prompt_of(destination="temp", crf=20)
    saver = {"video": ["3", 0], "filename_prefix": "video/copy", "format": "auto", "codec": "auto"}
    prompt["4"] = {"class_type": "SaveVideo", "inputs": saver}
    entry = server.finished(server.post(prompt))
    assert entry["status"]["status_str"] == "success", entry["status"]
    assert (server.base / "output" / "video" / "copy_00001_.mp4").stat().st_size > 0


def test_the_core_vae_loader_fits_too(server: Any) -> None:
    """One socket takes both kinds of VAE."""
    prompt = prompt_of(filename_prefix="video/core_vae")
    prompt["2"] = {"class_type": "VAELoader", "inputs": {"vae_name": "wan_2.1_vae_tiny.safetensors"}}
    entry = server.finished(server.post(prompt))
    assert entry["status"]["status_str"] == "success", entry["status"]


def test_a_bad_prefix_is_refused_before_the_run(server: Any) -> None:
    """The answer is 400 and says what is wrong with the name."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.post(prompt_of(filename_prefix="../outside"))
    assert caught.value.code == 400
    assert "leaves the output folder" in caught.value.read().decode()


def test_interrupt_stops_the_run_and_the_next_one_works(server: Any) -> None:
    """The stop button ends a long decode soon, leaves no file, and breaks nothing."""
    save_latent(server.base / "input" / "long.latent", frames=400, side=24)
    prompt_id = server.post(prompt_of("long.latent", filename_prefix="long/clip"))
    folder = server.base / "output" / "long"
    deadline = time.monotonic() + RUN_S
    while not (folder.is_dir() and any(folder.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.1)
    server.call("/interrupt", {})
    messages = [name for name, _ in server.finished(prompt_id)["status"]["messages"]]
    assert "execution_interrupted" in messages
    assert list(folder.glob("clip_0*_.mp4")) == []
    assert server.finished(server.post(prompt_of(crf=21)))["status"]["status_str"] == "success"


def test_the_log_holds_no_warning_of_ours(server: Any) -> None:
    """After all of that, no line of the log warns about the pack, but for the prompt we made wrong."""
    lines = server.log.read_text(errors="replace").lower().splitlines()
    warnings = [line for line in lines if "lowmem" in line and "warn" in line]
    assert [line for line in warnings if "invalid prompt" not in line] == []
