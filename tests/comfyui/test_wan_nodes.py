"""The nodes that make latents with Wan models, inside a real ComfyUI without its server."""

from __future__ import annotations

import importlib
import logging
import types
from pathlib import Path
from typing import Any

import pytest
import torch

PACK = "lowmem_pack_under_test"
T2V, HIGH, LOW = (
    f"{name}.safetensors" for name in ("wan2.1_t2v_tiny", "wan2.2_t2v_high_noise_tiny", "wan2.2_t2v_low_noise_tiny")
)
I2V = ("wan2.2_i2v_high_noise_tiny.safetensors", "wan2.2_i2v_low_noise_tiny.safetensors")
TI2V = "wan2.2_ti2v_tiny.safetensors"
VAES = {"2.1": "wan_2.1_vae_tiny.safetensors", "2.2": "wan2.2_vae_tiny.safetensors"}
WIDGETS = {
    "seed": 3,
    "steps": 2,
    "cfg": 4.0,
    "cfg_low_noise": 0.0,
    "sampler": "unipc",
    "shift": 5.0,
    "denoise": 1.0,
    "start_step": 0,
    "end_step": 10000,
    "add_noise": True,
    "leftover_noise": False,
    "memory_mode": "resident",
    "save_run": False,
    "resume": True,
}


def core(name: str) -> types.ModuleType:
    """Return a module of the core under the name it has inside the pack."""
    return importlib.import_module(f"{PACK}.lowmem_core.{name}")


def run(node: Any, **inputs: Any) -> tuple[Any, ...]:
    """Execute ``node`` on a locked clone as ComfyUI does, and return its outputs."""
    with torch.inference_mode():
        return node.PREPARE_CLASS_CLONE({"hidden_inputs": {}}).execute(**inputs).result


def conditioning(seed: int, **values: Any) -> list[Any]:
    """Return a ComfyUI conditioning."""
    return [[torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(seed)), values]]


def empty(channels: int, frames: int = 2, height: int = 4, width: int = 8) -> dict[str, Any]:
    """Return an empty ComfyUI latent."""
    return {"samples": torch.zeros(1, channels, frames, height, width)}


def model(nodes: dict[str, Any], high: str, low: str = "none", dtype: str = "fp32") -> Any:
    """Return a handle from the loader node."""
    return run(nodes["LowmemWanLoader"], model_name=high, low_noise_name=low, dtype=dtype)[0]


def denoise(nodes: dict[str, Any], files: Any, latent: dict[str, Any], **changes: Any) -> torch.Tensor:
    """Return the latents of the denoise node."""
    told = {"positive": conditioning(1), "negative": conditioning(2)}
    node = nodes["LowmemWanStreamingDenoise"]
    result: torch.Tensor = run(node, model=files, latent=latent, **(told | WIDGETS | changes))[0]["samples"]
    return result


@pytest.mark.parametrize(("high", "low"), [(T2V, "none"), (HIGH, LOW)])
def test_both_modes_make_the_same_latents(nodes: dict[str, Any], high: str, low: str) -> None:
    """The node's two modes, for one transformer and for two."""
    files, budget = model(nodes, high, low), core("memory").MemoryBudget(device_bytes=15 * 2**20)
    resident = denoise(nodes, files, empty(16))
    streamed = denoise(nodes, files, empty(16), memory_mode="stream", budget=budget)
    assert resident.shape == (1, 16, 2, 4, 8)
    assert torch.equal(resident, streamed)


def test_the_loader_loads_nothing(nodes: dict[str, Any]) -> None:
    """A handle holds paths, and travels through ComfyUI's caches at no cost."""
    files = model(nodes, HIGH, LOW)
    assert (files.high_noise.name, files.low_noise.name) == (HIGH, LOW)


def test_the_loader_refuses_a_path(nodes: dict[str, Any]) -> None:
    """Names stay inside the folders that ComfyUI gives."""
    with pytest.raises(core("errors").RequestError, match="no such model file"):
        model(nodes, "../../input/x.safetensors")


@pytest.mark.parametrize(("kind", "names"), [("2.1", I2V), ("2.2", (TI2V, "none"))])
def test_image_to_video(nodes: dict[str, Any], kind: str, names: tuple[str, str]) -> None:
    """An image goes beside the latents of image models, and is kept as first frame by TI2V models."""
    vae = run(nodes["LowmemWanVAELoader"], vae_name=VAES[kind], dtype="fp32")[0]
    positive, negative, latent = run(
        nodes["LowmemWanImageToVideo"],
        positive=conditioning(1),
        negative=conditioning(2),
        vae=vae,
        start_image=torch.rand(1, 50, 90, 3, generator=torch.Generator().manual_seed(0)),
        width=64,
        height=32,
        length=5,
    )
    files, told = model(nodes, *names), {"positive": positive, "negative": negative}
    resident = denoise(nodes, files, latent, **told)
    assert torch.equal(resident, denoise(nodes, files, latent, memory_mode="stream", **told))
    if kind == "2.2":
        assert torch.allclose(resident[:, :, :1], latent["samples"][:, :, :1], atol=1e-5)


def test_comfyui_own_image_node_gives_nearly_the_same(nodes: dict[str, Any]) -> None:
    """What ComfyUI's WanImageToVideo makes is accepted; its VAE rounds otherwise."""
    ours = nodes["LowmemWanImageToVideo"]
    handle = run(nodes["LowmemWanVAELoader"], vae_name=VAES["2.1"], dtype="fp32")[0]
    picture = torch.rand(1, 32, 64, 3, generator=torch.Generator().manual_seed(0))
    theirs = importlib.import_module("comfy_extras.nodes_wan").WanImageToVideo
    sd, utils = importlib.import_module("comfy.sd"), importlib.import_module("comfy.utils")
    vae = sd.VAE(sd=utils.load_torch_file(str(handle.path)), dtype=torch.float32)
    size = {"width": 64, "height": 32, "length": 5}
    told = {"positive": conditioning(1), "negative": conditioning(2)}
    with torch.inference_mode():
        made = theirs.execute(vae=vae, batch_size=1, start_image=picture, **size, **told).result
    own = run(ours, vae=handle, start_image=picture, **size, **told)
    for name in ("concat_latent_image", "concat_mask"):
        here, there = own[0][0][1][name], made[0][0][1][name]
        assert torch.allclose(here.expand_as(there) if here.shape[1] == 1 else here, there.expand_as(here), atol=2e-5)
    files = model(nodes, *I2V)
    results = [denoise(nodes, files, out[2], positive=out[0], negative=out[1]) for out in (own, made)]
    assert torch.allclose(*results, atol=1e-3)


def test_a_stopped_run_goes_on(nodes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop button loses nothing: the same prompt again takes the steps that are left."""
    management = importlib.import_module("comfy.model_management")
    node_module = importlib.import_module(f"{PACK}.nodes.wan_denoise")
    files, seen = model(nodes, T2V), []
    expected = denoise(nodes, files, empty(16), steps=4)
    original, calls = management.throw_exception_if_processing_interrupted, iter(range(10**6))

    def stop() -> None:
        if next(calls) == 30:
            raise management.InterruptProcessingException

    monkeypatch.setattr(management, "throw_exception_if_processing_interrupted", stop)
    with pytest.raises(management.InterruptProcessingException):
        denoise(nodes, files, empty(16), steps=4, save_run=True)
    monkeypatch.setattr(management, "throw_exception_if_processing_interrupted", original)
    plain = node_module.denoise_wan

    def watched(*arguments: Any) -> Any:
        report = plain(*arguments)
        seen.append(len(report.steps_s))
        return report

    monkeypatch.setattr(node_module, "denoise_wan", watched)
    assert torch.equal(denoise(nodes, files, empty(16), steps=4, save_run=True), expected)
    assert seen == [2]


def test_stream_mode_says_what_it_keeps_on_the_device(nodes: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """The log has the real figure, and says nothing of the kind when nothing is limited."""
    text = "Wan memory optimization: limiting resident transformer weights to about"
    files, budget = model(nodes, T2V), core("memory").MemoryBudget(device_bytes=15 * 2**20)
    with caplog.at_level(logging.INFO, "lowmem"):
        denoise(nodes, files, empty(16))
        assert text not in caplog.text
        denoise(nodes, files, empty(16), memory_mode="stream", budget=budget)
    assert text in caplog.text


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "two prompts": ({"positive": conditioning(1) * 2}, "must be one prompt"),
    "a control": ({"positive": conditioning(1, control=object())}, "cannot do"),
    "a batch": ({"latent": {"samples": torch.zeros(2, 16, 2, 4, 8)}}, "one video at a time"),
    "an image latent": ({"latent": {"samples": torch.zeros(1, 16, 4, 8)}}, "one video at a time"),
    "a noise mask": ({"latent": empty(16) | {"noise_mask": torch.ones(1, 1, 2, 4, 8)}}, "noise mask"),
    "latents of another VAE": ({"latent": empty(48)}, "other numbers of latent channels"),
    "steps out of range": ({"start_step": 5}, "range of steps"),
    "embeddings of another encoder": ({"positive": [[torch.zeros(1, 12, 77), {}]]}, "embedded for another model"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_work_is_explained(nodes: dict[str, Any], name: str) -> None:
    """The error names what is needed."""
    changes, message = BAD[name]
    latent = changes.get("latent", empty(16))
    with pytest.raises(core("errors").LowmemError, match=message):
        denoise(nodes, model(nodes, T2V), latent, **{key: value for key, value in changes.items() if key != "latent"})


def test_a_resident_run_that_does_not_fit_names_the_other_mode(nodes: dict[str, Any]) -> None:
    """Before anything is loaded."""
    budget = core("memory").MemoryBudget(device_bytes=12 * 2**20)
    with pytest.raises(core("errors").BudgetError, match='Use memory mode "stream"'):
        denoise(nodes, model(nodes, T2V), empty(16), budget=budget)


def test_previews_use_the_factors_of_comfyui(pack: types.ModuleType) -> None:
    """A picture of the latents' size for both kinds of VAE, and none for what is unknown."""
    host = importlib.import_module(f"{PACK}.nodes._comfy_host")
    for channels in (16, 48):
        assert host.latent_picture(channels)(torch.randn(1, channels, 3, 4, 8)).shape == (4, 8, 3)
    assert host.latent_picture(17) is None


def encoded(nodes: dict[str, Any], **changes: Any) -> tuple[Any, ...]:
    """Return both conditionings of the text node."""
    texts = {"text_encoder_name": "umt5_tiny.safetensors", "prompt": "a cat", "negative_prompt": "blurry"}
    return run(nodes["LowmemWanTextEncode"], **(texts | {"dtype": "fp32", "cache": False} | changes))


def test_prompts_become_conditionings(nodes: dict[str, Any]) -> None:
    """In ComfyUI's form, alike with and without the cache, and good for the denoise node."""
    positive, negative = encoded(nodes)
    assert positive[0][0].shape == (1, 512, 32)
    assert not torch.equal(positive[0][0], negative[0][0])
    for _ in range(2):
        assert torch.equal(encoded(nodes, cache=True)[0][0][0], positive[0][0])
    files = model(nodes, T2V)
    told = {"positive": positive, "negative": negative}
    budget = core("memory").MemoryBudget(device_bytes=15 * 2**20)
    streamed = denoise(nodes, files, empty(16), memory_mode="stream", budget=budget, **told)
    assert torch.equal(denoise(nodes, files, empty(16), **told), streamed)


def test_a_pipeline_folder_gives_the_same_embeds(nodes: dict[str, Any]) -> None:
    """The encoder and the tokenizer of a folder in models/diffusers, found by name."""
    folder = Path(importlib.import_module("folder_paths").get_folder_paths("diffusers")[0])
    core("tiny").write_tiny_umt5(folder / "tiny_wan", "diffusers")
    host = importlib.import_module(f"{PACK}.nodes._comfy_host")
    assert "diffusers/tiny_wan" in host.text_encoder_names()
    found, expected = encoded(nodes, text_encoder_name="diffusers/tiny_wan"), encoded(nodes)
    assert all(torch.equal(ours[0][0], theirs[0][0]) for ours, theirs in zip(found, expected, strict=True))


def test_a_text_encoder_outside_the_folders_is_refused(nodes: dict[str, Any]) -> None:
    """Names stay inside the folders that ComfyUI gives."""
    with pytest.raises(core("errors").RequestError, match="no such model file"):
        run(
            nodes["LowmemWanTextEncode"],
            text_encoder_name="diffusers/../vae",
            prompt="",
            negative_prompt="",
            dtype="auto",
            cache=False,
        )


def test_loras_change_the_latents_and_leave_no_trace(nodes: dict[str, Any]) -> None:
    """On both experts, streamed and resident alike; afterwards the model is as before."""
    plain = model(nodes, HIGH, LOW)
    before = denoise(nodes, plain, empty(16))
    ours = plain
    for name, target in (("high", "first or high-noise"), ("low", "low-noise")):
        lora = f"wan2.2_t2v_{name}_noise_lora_tiny.safetensors"
        ours = run(nodes["LowmemWanLoRA"], model=ours, lora_name=lora, strength=0.8, target=target)[0]
    resident = denoise(nodes, ours, empty(16))
    budget = core("memory").MemoryBudget(device_bytes=15 * 2**20)
    assert torch.equal(resident, denoise(nodes, ours, empty(16), memory_mode="stream", budget=budget))
    assert not torch.equal(resident, before)
    assert torch.equal(denoise(nodes, plain, empty(16)), before)
