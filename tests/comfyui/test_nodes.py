"""The nodes inside a real ComfyUI, without its server: schemas, values, errors."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
import warnings
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PACK = "lowmem_pack_under_test"
VAE_NAME = "wan_2.1_vae_tiny.safetensors"


@pytest.fixture
def handle(nodes: dict[str, Any]) -> Any:
    """Return the tiny VAE's handle from the loader node."""
    return run(nodes["LowmemWanVAELoader"], vae_name=VAE_NAME, dtype="fp32")[0]


@pytest.fixture
def own_vae(pack: types.ModuleType, base_directory: Path) -> Any:
    """Return the tiny VAE as ComfyUI's Load VAE gives it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sd, utils = importlib.import_module("comfy.sd"), importlib.import_module("comfy.utils")
        tensors = utils.load_torch_file(str(base_directory / "models" / "vae" / VAE_NAME))
        return sd.VAE(sd=tensors, dtype=torch.float32)


def core(name: str) -> types.ModuleType:
    """Return a module of the core under the name it has inside the pack."""
    return importlib.import_module(f"{PACK}.lowmem_core.{name}")


def run(node: Any, hidden: dict[str, Any] | None = None, **inputs: Any) -> tuple[Any, ...]:
    """Execute ``node`` on a locked clone as ComfyUI does, and return its outputs."""
    return output_of(node, hidden, **inputs).result


def output_of(node: Any, hidden: dict[str, Any] | None = None, **inputs: Any) -> Any:
    """Execute ``node`` and return the whole ``NodeOutput``."""
    io = importlib.import_module("comfy_api.latest").io
    values = {io.Hidden[name]: value for name, value in (hidden or {}).items()}
    with torch.inference_mode():
        return node.PREPARE_CLASS_CLONE({"hidden_inputs": values}).execute(**inputs)


def decode_inputs(vae: Any, **changes: Any) -> dict[str, Any]:
    """Return inputs of the decode node on a small random latent."""
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "samples": {"samples": torch.randn(1, 16, 3, 8, 8, generator=generator)},
        "vae": vae,
        "fps": 16.0,
        "codec": "h264",
        "crf": 18,
        "bit_depth": "8",
        "filename_prefix": "video/inprocess",
        "destination": "output",
        "tiling": "auto",
        "tile_size": 256,
    }
    return inputs | changes


def pixels_of(video: Any) -> torch.Tensor:
    """Return the uint8 frames ``[F, H, W, 3]`` of a VIDEO value's file."""
    with av.open(video.get_stream_source()) as container:
        frames = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    return torch.stack(frames)


def test_the_entry_point_lists_the_nodes(nodes: dict[str, Any]) -> None:
    """Node ids are a promise to saved workflows."""
    assert set(nodes) == {
        "LowmemMemoryBudget",
        "LowmemWanVAELoader",
        "LowmemWanStreamingDecode",
        "LowmemWanLoader",
        "LowmemWanLoRA",
        "LowmemWanTextEncode",
        "LowmemWanImageToVideo",
        "LowmemWanStreamingDenoise",
    }


def test_the_web_folder_exists(pack: types.ModuleType, nodes: dict[str, Any]) -> None:
    """ComfyUI serves the folder we name, and every node has a help page in it."""
    web = ROOT / pack.WEB_DIRECTORY
    assert {page.stem for page in (web / "docs").glob("*.md")} == set(nodes)


def test_every_input_has_a_tooltip(nodes: dict[str, Any]) -> None:
    """Nobody has to guess what a widget does."""
    bare = [
        f"{name}.{item.id}" for name, node in nodes.items() for item in node.define_schema().inputs if not item.tooltip
    ]
    assert bare == []


def test_schemas_hold_for_the_host(nodes: dict[str, Any]) -> None:
    """ComfyUI can finish each schema and describe it to the frontend."""
    for node in nodes.values():
        assert node.GET_NODE_INFO_V1()["input_order"]


def test_the_loader_loads_nothing(handle: Any) -> None:
    """What travels between nodes is a path and settings."""
    assert (handle.path.name, handle.dtype) == (VAE_NAME, "fp32")


def test_the_loader_refuses_a_path(nodes: dict[str, Any]) -> None:
    """A name that leads out of the model folders is no VAE file."""
    with pytest.raises(core("errors").RequestError, match="no such model file"):
        run(nodes["LowmemWanVAELoader"], vae_name="../../input/wan_2.1_tiny_128x96x5.latent", dtype="auto")


@pytest.mark.parametrize(("gib", "expected"), [(0.0, None), (1.5, 3 * 512 * 1024**2)])
def test_the_budget_node_counts_in_gib(nodes: dict[str, Any], gib: float, expected: int | None) -> None:
    """0 means no limit of ours."""
    assert run(nodes["LowmemMemoryBudget"], device_gib=gib)[0].device_bytes == expected


def test_decode_writes_a_video(nodes: dict[str, Any], handle: Any, base_directory: Path) -> None:
    """The VIDEO is the finished file in the output folder, and the preview names it."""
    result = output_of(nodes["LowmemWanStreamingDecode"], **decode_inputs(handle))
    video, report = result.result
    path = Path(video.get_stream_source())
    assert path.parent == base_directory / "output" / "video"
    assert video.get_dimensions() == (64, 64)
    assert tuple(pixels_of(video).shape) == (9, 64, 64, 3)
    assert result.ui.as_dict()["images"] == [{"filename": path.name, "subfolder": "video", "type": "output"}]
    assert report


def test_decode_leaves_only_the_finished_file(nodes: dict[str, Any], handle: Any, base_directory: Path) -> None:
    """Temporary names do not stay behind."""
    run(nodes["LowmemWanStreamingDecode"], **decode_inputs(handle, filename_prefix="alone/clip"))
    assert [path.name for path in (base_directory / "output" / "alone").iterdir()] == ["clip_00001_.mp4"]


def test_temp_destination(nodes: dict[str, Any], handle: Any, base_directory: Path) -> None:
    """A video that another node will save can go to the temp folder."""
    result = output_of(nodes["LowmemWanStreamingDecode"], **decode_inputs(handle, destination="temp"))
    assert base_directory / "temp" in Path(result.result[0].get_stream_source()).parents
    assert result.ui.as_dict()["images"][0]["type"] == "temp"


def test_comfyui_own_vae_gives_the_same_pixels(nodes: dict[str, Any], handle: Any, own_vae: Any) -> None:
    """The VAE of ComfyUI's Load VAE is taken as it is."""
    decode = nodes["LowmemWanStreamingDecode"]
    ours, theirs = (run(decode, **decode_inputs(vae, crf=0))[0] for vae in (handle, own_vae))
    assert torch.equal(pixels_of(ours), pixels_of(theirs))


def test_comfyui_decodes_to_nearly_the_same_pixels(nodes: dict[str, Any], handle: Any, own_vae: Any) -> None:
    """ComfyUI's own VAE Decode agrees within what chroma subsampling and rounding cost."""
    inputs = decode_inputs(handle, crf=0)
    ours = pixels_of(run(nodes["LowmemWanStreamingDecode"], **inputs)[0]).float()
    with torch.inference_mode():
        theirs = own_vae.decode(inputs["samples"]["samples"])[0].mul(255).cpu()
    assert (ours - theirs).abs().mean() < 4.0


def test_another_models_vae_is_refused(nodes: dict[str, Any]) -> None:
    """The message names what is needed."""
    other = types.SimpleNamespace(first_stage_model=torch.nn.Identity())
    with pytest.raises(core("errors").RequestError, match=r"need a Wan 2\.1 .* have Identity"):
        run(nodes["LowmemWanStreamingDecode"], **decode_inputs(other))


def test_a_nested_latent_gives_its_video(nodes: dict[str, Any]) -> None:
    """Audio-video models put two tensors into one latent."""
    nested = importlib.import_module("comfy.nested_tensor").NestedTensor
    video, sound = torch.zeros(1, 16, 3, 8, 8), torch.zeros(1, 8, 4, 2)
    decode = sys.modules[f"{PACK}.nodes.wan_decode"]
    assert decode.latents_of({"samples": nested([video, sound])}) is video


@pytest.mark.parametrize("prefix", ["../outside", "/outside", "video/../../outside", ""])
def test_a_prefix_that_leaves_is_refused(nodes: dict[str, Any], handle: Any, prefix: str) -> None:
    """Both before the run and, for a connected prefix, in it."""
    decode = nodes["LowmemWanStreamingDecode"]
    assert "leaves the output folder" in decode.validate_inputs(filename_prefix=prefix)
    with pytest.raises(core("errors").RequestError, match="leaves the output folder"):
        run(decode, **decode_inputs(handle, filename_prefix=prefix))


def test_sound_is_written(nodes: dict[str, Any], handle: Any) -> None:
    """AUDIO from any node becomes a stream of the mp4."""
    audio = {"waveform": torch.zeros(1, 2, 9000), "sample_rate": 16000}
    video = run(nodes["LowmemWanStreamingDecode"], **decode_inputs(handle, audio=audio))[0]
    with av.open(video.get_stream_source()) as container:
        assert len(container.streams.audio) == 1


def test_metadata_restores_the_workflow(nodes: dict[str, Any], handle: Any) -> None:
    """The prompt and each extra field are JSON in the container."""
    hidden = {"prompt": {"1": {"class_type": "X"}}, "extra_pnginfo": {"workflow": {"nodes": []}}}
    video = run(nodes["LowmemWanStreamingDecode"], hidden=hidden, **decode_inputs(handle))[0]
    with av.open(video.get_stream_source()) as container:
        found = {key: container.metadata[key] for key in ("prompt", "workflow")}
    assert found == {"prompt": '{"1": {"class_type": "X"}}', "workflow": '{"nodes": []}'}


def test_disabled_metadata_is_honoured(pack: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--disable-metadata`` holds for our files too."""
    args = importlib.import_module("comfy.cli_args").args
    monkeypatch.setattr(args, "disable_metadata", True)
    host = sys.modules[f"{PACK}.nodes._comfy_host"]
    assert host.workflow_metadata({"1": {}}, {"workflow": {}}) == {}


def test_fractional_rates_are_exact(nodes: dict[str, Any], handle: Any) -> None:
    """23.976 means 24000/1001, as every player reads it."""
    video = run(nodes["LowmemWanStreamingDecode"], **decode_inputs(handle, fps=23.976))[0]
    with av.open(video.get_stream_source()) as container:
        assert container.streams.video[0].average_rate == Fraction(24000, 1001)


def test_sized_tiles_reach_the_core(nodes: dict[str, Any], handle: Any) -> None:
    """Exact tiles give the pixels of whole frames."""
    decode = nodes["LowmemWanStreamingDecode"]
    whole = run(decode, **decode_inputs(handle, crf=0, tiling="off"))[0]
    tiled = run(decode, **decode_inputs(handle, crf=0, tiling="size", tile_size=64))[0]
    assert (pixels_of(whole).float() - pixels_of(tiled).float()).abs().max() <= 1.0


def test_a_budget_that_is_too_small_names_one_that_works(nodes: dict[str, Any], handle: Any) -> None:
    """Nothing is written, and the error carries the smallest budget."""
    budget = core("memory").MemoryBudget(device_bytes=1024)
    with pytest.raises(core("errors").BudgetError) as caught:
        run(nodes["LowmemWanStreamingDecode"], **decode_inputs(handle, budget=budget))
    assert caught.value.smallest_bytes > 1024


def test_the_stop_button_stops(nodes: dict[str, Any], handle: Any, base_directory: Path) -> None:
    """ComfyUI's own exception comes out, and no file stays under the final name."""
    management = importlib.import_module("comfy.model_management")
    management.interrupt_current_processing(True)
    inputs = decode_inputs(handle, filename_prefix="stopped/clip")
    with pytest.raises(management.InterruptProcessingException):
        run(nodes["LowmemWanStreamingDecode"], **inputs)
    assert list((base_directory / "output" / "stopped").glob("clip*.mp4")) == []


@pytest.mark.parametrize(
    ("widget", "left"), [({}, 1), ({"keep_partial": True}, 1), ({"keep_partial": False}, 0)], ids=str
)
def test_a_stopped_run_keeps_its_part_if_wanted(
    nodes: dict[str, Any],
    handle: Any,
    base_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    widget: dict[str, bool],
    left: int,
) -> None:
    """The part is what was decoded by then; workflows saved without the widget keep it."""
    management = importlib.import_module("comfy.model_management")
    decoder = core("decode.stream").LatentFrameDecoder
    original = decoder.decode

    def stop_at_the_last(self: Any, latent: torch.Tensor, index: int, count: int) -> torch.Tensor:
        if index == count - 1:
            management.interrupt_current_processing(True)
            management.throw_exception_if_processing_interrupted()
        return original(self, latent, index, count)

    monkeypatch.setattr(decoder, "decode", stop_at_the_last)
    name = f"part{len(widget)}{left}"
    with pytest.raises(management.InterruptProcessingException):
        run(nodes["LowmemWanStreamingDecode"], **decode_inputs(handle, filename_prefix=f"{name}/clip", **widget))
    assert len(list((base_directory / "output" / name).glob("*.partial.mp4"))) == left


def test_progress_and_preview_reach_the_host(pack: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar carries the node's id, and previews are JPEG images."""
    calls: list[tuple[Any, ...]] = []
    utils = importlib.import_module("comfy.utils")
    monkeypatch.setattr(utils, "PROGRESS_BAR_HOOK", lambda *values, node_id=None: calls.append((*values, node_id)))
    progress = sys.modules[f"{PACK}.nodes._comfy_host"].ComfyProgress("5:12")
    progress.update(1, 4, "decode")
    progress.preview(torch.rand(8, 12, 3))
    assert calls[0] == (1, 4, None, "5:12")
    kind, image, size = calls[1][2]
    assert (kind, image.size, size) == ("JPEG", (12, 8), 512)


def test_decode_shows_progress_but_no_pictures(
    nodes: dict[str, Any], handle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture sent while the node runs would keep the page from showing the video after it."""
    calls: list[tuple[Any, ...]] = []
    utils = importlib.import_module("comfy.utils")
    monkeypatch.setattr(utils, "PROGRESS_BAR_HOOK", lambda *values, node_id=None: calls.append(values))
    run(nodes["LowmemWanStreamingDecode"], **decode_inputs(handle, filename_prefix="unpictured/clip"))
    assert calls
    assert [picture for _, _, picture in calls if picture is not None] == []


def test_devices_are_those_of_the_host(pack: types.ModuleType) -> None:
    """On the CPU nothing is counted, and asking for room is harmless."""
    devices = sys.modules[f"{PACK}.nodes._comfy_host"].ComfyDevices()
    devices.make_room(1)
    assert (devices.compute.type, devices.free_bytes()) == ("cpu", None)
