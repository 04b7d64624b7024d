"""A Wan denoise from files to latents equals diffusers' pipelines, in every memory mode and from every source."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowmem_core.denoise import LoraUse, RunStore, SamplerSettings, SavePolicy
from lowmem_core.errors import BudgetError, NotFiniteError, RequestError
from lowmem_core.families.wan.models import ModelShelf, WanFiles
from lowmem_core.families.wan.sampling import Guidance
from lowmem_core.host import Host, PlainDevices
from lowmem_core.memory import MemoryBudget
from lowmem_core.pipeline import RunSaving, denoise_wan, plan_wan
from lowmem_core.shapes import LatentShape
from lowmem_core.tiny import write_tiny_wan, write_tiny_wan_lora
from lowmem_core.units import MiB

HOST = Host(PlainDevices("cpu"))
LIMIT = 10 * MiB
"""Less than half of the weights, and room for two of seven blocks."""
STREAM = {"memory_mode": "stream", "budget": MemoryBudget(device_bytes=LIMIT)}
MODES = {
    "resident": {"memory_mode": "resident"},
    "stream": STREAM,
    "disk": {"memory_mode": "stream", "budget": MemoryBudget(device_bytes=LIMIT, host_bytes=1 * MiB)},
    "resident from disk": {"memory_mode": "resident", "budget": MemoryBudget(host_bytes=1 * MiB)},
}


class Stop(BaseException):
    """What a host raises when its user asks to stop."""


class StopAt:
    """A stop button that is pressed at a moment.

    Args:
        count: Checks until then.
    """

    def __init__(self, count: int) -> None:
        self.left = count

    def check(self) -> None:
        """Raise when it is time."""
        self.left -= 1
        if self.left < 0:
            raise Stop


def smallest_budget(wan: Any) -> int:
    """Return what the error of a budget that is too small names."""
    with pytest.raises(BudgetError, match="even streamed; need") as caught:
        denoise_wan(wan.request("t2v", memory_mode="stream", budget=MemoryBudget(device_bytes=1 * MiB)), HOST)
    assert caught.value.smallest_bytes is not None
    return caught.value.smallest_bytes


@pytest.mark.parametrize("name", ["t2v", "t2v two", "i2v two", "ti2v", "ti2v image"])
def test_every_mode_makes_what_diffusers_makes(name: str, wan: Any) -> None:
    """Plain, streamed from host memory and from disk: the same bits, and never more than planned."""
    expected = wan.diffusers_latents(name)
    for mode, changes in MODES.items():
        report = denoise_wan(wan.request(name, **changes), HOST)
        assert torch.equal(report.latents, expected), mode
        assert report.source == ("disk" if "disk" in mode else "host")
        peak = report.memory.measured_peak_bytes
        assert peak is not None
        assert peak <= report.plan.planned_peak_bytes, mode
        assert (report.streamed_bytes > 0) == (changes["memory_mode"] == "stream")


def test_sharing_blocks_halves_the_bytes_on_the_bus(wan: Any) -> None:
    """Both guidance passes use a block while it is there, if the budget has room for both."""
    roomy = denoise_wan(wan.request("t2v", **STREAM), HOST)
    smallest = MemoryBudget(device_bytes=smallest_budget(wan))
    tight = denoise_wan(wan.request("t2v", memory_mode="stream", budget=smallest), HOST)
    assert (roomy.plan.shares_blocks, tight.plan.shares_blocks) == (True, False)
    passes = roomy.plan.streams[0].streamed_bytes, tight.plan.streams[0].streamed_bytes
    assert roomy.streamed_bytes == pytest.approx(3 * passes[0], rel=0.4)
    assert tight.streamed_bytes == pytest.approx(6 * passes[1], rel=0.2)
    assert torch.equal(roomy.latents, tight.latents)


def test_the_smallest_budget_named_is_enough_and_less_is_not(wan: Any) -> None:
    """The error names a number that works."""
    smallest = smallest_budget(wan)
    run = wan.request("t2v", memory_mode="stream", budget=MemoryBudget(device_bytes=smallest))
    assert denoise_wan(run, HOST).memory.measured_peak_bytes <= smallest
    with pytest.raises(BudgetError):
        denoise_wan(replace(run, budget=MemoryBudget(device_bytes=smallest - 1)), HOST)


def test_a_resident_run_that_does_not_fit_names_the_mode_that_does(wan: Any) -> None:
    """Before anything is loaded."""
    shelf = ModelShelf()
    with pytest.raises(BudgetError, match='Use memory mode "stream"'):
        denoise_wan(wan.request("t2v", budget=MemoryBudget(device_bytes=15 * MiB)), HOST, shelf)
    assert all(one.locations for one in shelf._held.values())


BAD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "experts of two kinds": (
        lambda wan: wan.request("t2v", files=WanFiles(wan.path("t2v"), wan.path("i2v", "low"))),
        "of another kind",
    ),
    "the VAE of another model": (
        lambda wan: wan.request("t2v", shape=LatentShape(48, 3, 2, 4)),
        "other numbers of latent channels",
    ),
    "latents of another size": (
        lambda wan: wan.request("t2v", latents=torch.zeros(1, 16, 3, 8, 8)),
        "input latents have another shape",
    ),
    "an image for a text model": (
        lambda wan: wan.request("t2v", conditioning=wan.request("i2v two").conditioning),
        "do not belong together",
    ),
    "no image for an image model": (
        lambda wan: wan.request("i2v two", conditioning=wan.request("t2v").conditioning),
        "do not belong together",
    ),
    "no negative prompt": (
        lambda wan: wan.request(
            "t2v", conditioning=replace(wan.request("t2v").conditioning, negative_prompt_embeds=None)
        ),
        "negative",
    ),
    "embeddings of another encoder": (
        lambda wan: wan.request(
            "t2v", conditioning=replace(wan.request("t2v").conditioning, prompt_embeds=torch.zeros(1, 12, 48))
        ),
        "width",
    ),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("mode", ["resident", "stream"])
def test_parts_that_do_not_belong_together_are_refused(name: str, mode: str, wan: Any) -> None:
    """With what is needed and what was given."""
    request, message = BAD[name]
    with pytest.raises(RequestError, match=message):
        denoise_wan(replace(request(wan), memory_mode=mode), HOST)


@pytest.mark.parametrize(
    ("mode", "counts"), [("stream", range(0, 44, 2)), ("disk", range(3, 44, 9)), ("resident", (5, 20))]
)
def test_a_run_stopped_at_any_block_goes_on_with_the_same_bits(
    mode: str, counts: Any, wan: Any, tmp_path: Path
) -> None:
    """Nothing stays on the device, the same modules run again, and the result is that of an uninterrupted run."""
    shelf, changes = ModelShelf(), MODES[mode]
    expected = denoise_wan(wan.request("t2v two", **changes), HOST, shelf).latents
    held = [tensor.data_ptr() for one in shelf._held.values() for tensor in one.module.parameters()]
    for count in counts:
        store = RunStore(tmp_path / str(count))
        request = wan.request("t2v two", saving=RunSaving(store, SavePolicy(interval_s=0)), **changes)
        with pytest.raises(Stop):
            denoise_wan(request, Host(PlainDevices("cpu"), interrupt=StopAt(count)), shelf)
        assert held == [tensor.data_ptr() for one in shelf._held.values() for tensor in one.module.parameters()]
        report = denoise_wan(request, HOST, shelf)
        assert torch.equal(report.latents, expected)
        assert report.saved is not None
        report.saved.finish()
        assert store.list_runs() == []


def test_another_request_does_not_pick_a_run_up(wan: Any, tmp_path: Path) -> None:
    """A changed seed, guidance or file is another run; another memory mode is the same one."""
    saving = RunSaving(RunStore(tmp_path), SavePolicy(interval_s=0))
    request = wan.request("t2v", saving=saving)
    with pytest.raises(Stop):
        denoise_wan(request, Host(PlainDevices("cpu"), interrupt=StopAt(18)), None)
    assert len(denoise_wan(replace(request, seed=8), HOST).steps_s) == 3
    assert len(denoise_wan(replace(request, guidance=Guidance(3.0)), HOST).steps_s) == 3
    assert len(denoise_wan(replace(request, files=WanFiles(wan.path("t2v", "low"))), HOST).steps_s) == 3
    assert len(denoise_wan(replace(request, **STREAM), HOST).steps_s) < 3


def test_nan_names_the_step_and_the_state_before_it_is_saved(wan: Any, tmp_path: Path) -> None:
    """A broken low-noise file costs the steps after the boundary, not those before it."""
    tensors = load_file(wan.path("t2v", "low"))
    tensors["head.head.bias"][0] = float("nan")
    save_file(tensors, tmp_path / "broken.safetensors")
    store = RunStore(tmp_path / "runs")
    request = wan.request(
        "t2v",
        files=WanFiles(wan.path("t2v"), tmp_path / "broken.safetensors"),
        sampler=SamplerSettings("unipc", 5, 5.0),
        saving=RunSaving(store),
    )
    with pytest.raises(NotFiniteError, match="not finite at step 4 of 5"):
        denoise_wan(replace(request, **STREAM), HOST)
    assert [(run.step, run.steps) for run in store.list_runs()] == [(3, 5)]


def test_two_threads_with_two_models(wan: Any) -> None:
    """Each run has its own streamer and its own budget."""
    names, found = ["t2v", "ti2v"], {}
    expected = {name: denoise_wan(wan.request(name, **STREAM), HOST).latents for name in names}

    def work(name: str) -> None:
        found[name] = denoise_wan(wan.request(name, **STREAM), Host(PlainDevices("cpu"))).latents

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[name], expected[name]) for name in names)


def test_stages_make_the_bits_of_the_whole_run(wan: Any) -> None:
    """A run cut in two by steps, with the noise left over in between, as ComfyUI's samplers do it."""
    whole = denoise_wan(wan.request("t2v"), HOST).latents
    first = denoise_wan(wan.request("t2v", sampler=SamplerSettings("euler", 3, 5.0, end_step=2)), HOST).latents
    second = wan.request("t2v", sampler=SamplerSettings("euler", 3, 5.0, start_step=2), latents=first, adds_noise=False)
    euler = denoise_wan(wan.request("t2v", sampler=SamplerSettings("euler", 3, 5.0)), HOST).latents
    assert not torch.equal(whole, euler)
    assert torch.allclose(denoise_wan(second, HOST).latents, euler, atol=1e-4)


def test_a_plan_loads_nothing(wan: Any, tmp_path: Path) -> None:
    """What a run needs is told from file headers, and damaged data behind them does not matter."""
    path = write_tiny_wan(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[-1000:] = bytes(1000)
    path.write_bytes(bytes(raw))
    plan, source = plan_wan(wan.request("t2v", files=WanFiles(path), **STREAM), HOST, ModelShelf())
    assert plan.planned_peak_bytes <= LIMIT
    assert source == "host"


def test_previews_show_every_step(wan: Any) -> None:
    """The picture is made of clean latents and reaches the host."""
    shown: list[Tensor] = []

    class Screen:
        def update(self, done: int, total: int, phase: str) -> None:
            """Ignore the bar."""

        def preview(self, frame: Tensor) -> None:
            """Keep the frame."""
            shown.append(frame)

    request = wan.request("t2v", to_picture=lambda latents: latents[0, :3, 0].movedim(0, -1))
    denoise_wan(request, Host(PlainDevices("cpu"), progress=Screen()))
    assert [tuple(frame.shape) for frame in shown] == [(4, 8, 3)] * 3


def in_fp8(path: Path, source: Path) -> Path:
    """Write a model with its linear weights in fp8."""
    tensors = load_file(source)
    linear = [name for name, tensor in tensors.items() if name.endswith(".weight") and tensor.ndim == 2]
    linear = [name for name in linear if "norm" not in name]
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn) for name in linear}, path)
    return path


def test_quantised_files_and_loras_stay_within_the_plan(wan: Any, tmp_path: Path) -> None:
    """Decoded weights and branches are planned for; all modes make the same bits."""
    lora = LoraUse(write_tiny_wan_lora(tmp_path, "t2v", "lora_down", seed=3, rank=16), 0.8)
    experts = [in_fp8(tmp_path / f"{expert}.safetensors", wan.path("t2v", expert)) for expert in ("high", "low")]
    loras = (lora, lora._replace(model=1, strength=-0.5))
    name, files = "t2v two", WanFiles(experts[0], experts[1], torch.bfloat16, loras)
    found = []
    for mode, budget in (
        ("resident", MemoryBudget()),
        ("stream", MemoryBudget()),
        ("stream", MemoryBudget(host_bytes=1 * MiB)),
    ):
        report = denoise_wan(wan.request(name, files=files, memory_mode=mode, budget=budget), HOST)
        assert report.memory.measured_peak_bytes <= report.plan.planned_peak_bytes
        found.append(report.latents)
        tight = replace(budget, device_bytes=MiB)
        with pytest.raises(BudgetError) as caught:
            denoise_wan(wan.request(name, files=files, memory_mode=mode, budget=tight), HOST)
        tight = replace(budget, device_bytes=caught.value.smallest_bytes)
        report = denoise_wan(wan.request(name, files=files, memory_mode=mode, budget=tight), HOST)
        assert report.memory.measured_peak_bytes <= caught.value.smallest_bytes
        found.append(report.latents)
    assert all(torch.equal(latents, found[0]) for latents in found)
    plain = denoise_wan(wan.request(name, files=replace(files, loras=())), HOST).latents
    assert not torch.equal(plain, found[0])


def test_attaching_and_detaching_for_each_step_changes_nothing(wan: Any, tmp_path: Path) -> None:
    """A run that is stopped and taken up after every step leaves no hooks behind and ends with the same bits."""
    shelf = ModelShelf()
    request = wan.request("t2v two", saving=RunSaving(RunStore(tmp_path), SavePolicy(interval_s=0)), **STREAM)
    expected = denoise_wan(wan.request("t2v two"), HOST).latents
    hooks: list[int] = []
    for _ in range(50):
        try:
            report = denoise_wan(request, Host(PlainDevices("cpu"), interrupt=StopAt(20)), shelf)
            break
        except Stop:
            modules = [module for one in shelf._held.values() for module in one.module.modules()]
            hooks.append(sum(len(one._forward_pre_hooks) + len(one._forward_hooks) for one in modules))
            assert not any("forward" in one.__dict__ for one in modules)
    assert len(hooks) >= 2
    assert set(hooks) == {0}
    assert torch.equal(report.latents, expected)
