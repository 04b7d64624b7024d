"""A run that is stopped, fails or is killed goes on where it was, with the bits of one that was not."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowmem_core.denoise import (
    SAMPLERS,
    Fingerprint,
    RunStore,
    SamplerSettings,
    SavedRun,
    SavePolicy,
    denoise,
    make_stepper,
    save_latents,
)
from lowmem_core.errors import NotFiniteError, RequestError, WriteError
from lowmem_core.load import read_latents

CPU = torch.device("cpu")
EACH = SavePolicy(interval_s=0)
ON_STOP = SavePolicy(interval_s=1e9)
CHILD = """
import os, signal, sys
import torch
from lowmem_core.denoise import *

folder, sampler, at = sys.argv[1], sys.argv[2], int(sys.argv[3])
noise = torch.randn(1, 4, 3, 4, 4, generator=torch.Generator().manual_seed(0))

def model(latents, timestep, step_index):
    if step_index == at:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.tanh(1.7 * latents + latents.roll(1, -1)) * (0.5 + float(timestep) / 2000)

run = SavedRun(RunStore(folder), Fingerprint.of([], {"sampler": sampler}, {}), SavePolicy(interval_s=0))
denoise(model, noise, make_stepper(SamplerSettings(sampler, 4, 5.0)), saving=run)
"""


class Stop(BaseException):
    """Leaves a run as Ctrl-C does."""


def stop(latents: Tensor) -> None:
    """Leave the run."""
    raise Stop


def request(**settings: Any) -> Fingerprint:
    """Return the fingerprint of a request without files."""
    return Fingerprint.of([], settings, {}, what="a test")


def stepper(sampler: str = "unipc") -> Any:
    """Return a stepper of four steps."""
    return make_stepper(SamplerSettings(sampler, 4, 5.0))


def stopped(store: RunStore, model: Any, noise: Tensor, policy: SavePolicy = EACH) -> None:
    """Run until ``model`` stops it."""
    with pytest.raises(Stop):
        denoise(model, noise, stepper(), saving=SavedRun(store, request(), policy))


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("policy", [EACH, ON_STOP])
def test_a_run_stopped_in_any_step_goes_on_with_the_same_bits(
    sampler: str, at: int, policy: SavePolicy, toy_model: Any, noise: Tensor, tmp_path: Path
) -> None:
    """Whether each step was saved or the one that was left; only the step it was stopped in is repeated."""
    expected = denoise(toy_model(), noise, stepper(sampler))
    run = SavedRun(RunStore(tmp_path), request(), policy)
    with pytest.raises(Stop):
        denoise(toy_model(at, stop), noise, stepper(sampler), saving=run)
    again = toy_model()
    assert torch.equal(denoise(again, noise, stepper(sampler), saving=run), expected)
    assert again.calls == 4 - at


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
@pytest.mark.parametrize(("sampler", "at"), [("unipc", 1), ("unipc", 3), ("euler", 2)])
def test_a_killed_run_goes_on_with_the_same_bits(
    sampler: str, at: int, toy_model: Any, noise: Tensor, tmp_path: Path
) -> None:
    """Nothing of the process has to survive but the folder."""
    child = [sys.executable, "-c", CHILD, str(tmp_path), sampler, str(at)]
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    assert subprocess.run(child, env=environment, check=False).returncode == -signal.SIGKILL
    model = toy_model()
    run = SavedRun(RunStore(tmp_path), request(sampler=sampler))
    result = denoise(model, noise, stepper(sampler), saving=run)
    assert model.calls == 4 - at
    assert torch.equal(result, denoise(toy_model(), noise, stepper(sampler)))


def test_a_kill_while_writing_leaves_the_former_state(
    toy_model: Any, noise: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state gets its name only when it is whole."""
    store = RunStore(tmp_path)
    stopped(store, toy_model(2, stop), noise)

    def fail(source: Any, target: Any) -> None:
        raise Stop

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(Stop):
        store.save(request(), {"latents": noise}, {"step": 3})
    monkeypatch.undo()
    saved = store.load(request())
    assert saved is not None
    assert saved.values["step"] == 2
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, NotFiniteError, MemoryError])
def test_any_reason_to_leave_saves_the_run(
    error: type[BaseException], toy_model: Any, noise: Tensor, tmp_path: Path
) -> None:
    """Interrupts, errors of ours, and errors of the machine."""

    def leave(latents: Tensor) -> Tensor:
        if error is NotFiniteError:
            return latents * float("nan")
        raise error

    store = RunStore(tmp_path)
    with pytest.raises(error):
        denoise(toy_model(2, leave), noise, stepper(), saving=SavedRun(store, request(), ON_STOP))
    assert [(info.step, info.steps, info.what) for info in store.list_runs()] == [(2, 4, "a test")]


def test_an_error_in_a_callback_keeps_the_step_before_it(toy_model: Any, noise: Tensor, tmp_path: Path) -> None:
    """The stepper has moved on by then, the saved state has not."""

    def fail(result: Any) -> None:
        if result.step == 3:
            raise Stop

    run = SavedRun(RunStore(tmp_path), request(), ON_STOP)
    with pytest.raises(Stop):
        denoise(toy_model(), noise, stepper(), on_step=fail, saving=run)
    assert torch.equal(denoise(toy_model(), noise, stepper(), saving=run), denoise(toy_model(), noise, stepper()))


@pytest.mark.parametrize(("step_s", "saves"), [(10.5, [1, 2, 3, 4]), (4.0, [3, 4]), (0.1, [4])])
def test_slow_steps_are_saved_each_and_fast_ones_now_and_then(
    step_s: float, saves: list[int], toy_model: Any, noise: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most ten seconds and one step are lost to a power cut, and the end is there when a decode fails."""
    now, steps = [0.0], []

    def tick(latents: Tensor) -> None:
        now[0] += step_s

    store = RunStore(tmp_path)
    original = store.save
    monkeypatch.setattr(store, "save", lambda *given: steps.append(given[2]["step"]) or original(*given))
    model = toy_model()

    def timed(latents: Tensor, timestep: Tensor, step_index: int) -> Tensor:
        tick(latents)
        result: Tensor = model(latents, timestep, step_index)
        return result

    denoise(timed, noise, stepper(), saving=SavedRun(store, request(), clock=lambda: now[0]))
    assert steps == saves


def test_a_finished_run_is_kept_until_its_result_is_safe(toy_model: Any, noise: Tensor, tmp_path: Path) -> None:
    """A crash between the last step and the file of the result costs nothing."""
    store = RunStore(tmp_path)
    run = SavedRun(store, request(), EACH)
    result = denoise(toy_model(), noise, stepper(), saving=run)
    model = toy_model()
    assert torch.equal(denoise(model, noise, stepper(), saving=run), result)
    assert model.calls == 0
    run.finish()
    assert store.list_runs() == []


def test_never_resuming_starts_anew(toy_model: Any, noise: Tensor, tmp_path: Path) -> None:
    """The former state is removed, so that it is not picked up later either."""
    store, model = RunStore(tmp_path), toy_model()
    stopped(store, toy_model(2, stop), noise)
    denoise(model, noise, stepper(), saving=SavedRun(store, request(), ON_STOP, resume="never"))
    assert model.calls == 4
    assert [run.step for run in store.list_runs()] == [4]


def test_with_saving_off_no_folder_is_made(toy_model: Any, noise: Tensor, tmp_path: Path) -> None:
    """The opt-out touches no disk at all."""
    store = RunStore(tmp_path / "runs")
    stopped(store, toy_model(2, stop), noise, SavePolicy(is_on=False))
    assert not (tmp_path / "runs").exists()


def test_another_way_to_resume_is_refused(tmp_path: Path) -> None:
    """A typing error must not start a ten-hour run anew."""
    with pytest.raises(RequestError, match="auto or never"):
        SavedRun(RunStore(tmp_path), request(), resume="Auto")


def test_another_request_does_not_pick_a_run_up(toy_model: Any, noise: Tensor, tmp_path: Path) -> None:
    """It starts anew, and both states live side by side."""
    store = RunStore(tmp_path)
    stopped(store, toy_model(2, stop), noise)
    model = toy_model()
    denoise(model, noise, stepper(), saving=SavedRun(store, request(seed=1), EACH))
    assert model.calls == 4
    assert len(store.list_runs()) == 2


def damage(path: Path, how: str) -> None:
    """Spoil a saved run."""
    data = path.read_bytes()
    if how == "truncated":
        path.write_bytes(data[:-100])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "flipped":
        path.write_bytes(data[:-10] + bytes([data[-10] ^ 1]) + data[-9:])
    elif how == "foreign":
        save_file({"latents": torch.zeros(1)}, str(path))


@pytest.mark.parametrize("how", ["truncated", "empty", "flipped", "foreign"])
def test_a_damaged_state_is_passed_over_with_a_warning(
    how: str, toy_model: Any, noise: Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run starts anew, and the list still shows the file so that it can be removed."""
    store, model = RunStore(tmp_path), toy_model()
    stopped(store, toy_model(2, stop), noise)
    (path,) = tmp_path.iterdir()
    damage(path, how)
    (listed,) = store.list_runs()
    with caplog.at_level(logging.WARNING, "lowmem"):
        denoise(model, noise, stepper(), saving=SavedRun(store, request(), ON_STOP))
    assert "damaged" in caplog.text
    assert model.calls == 4
    assert store.remove(listed.name)


def rewrite(path: Path, change: Any) -> None:
    """Write a saved run again with another header."""
    from safetensors import safe_open

    with safe_open(str(path), "pt") as file:
        header = json.loads(file.metadata()["lowmem_run"])
    change(header)
    save_file(
        {name: tensor.clone() for name, tensor in load_file(path).items()}, path, {"lowmem_run": json.dumps(header)}
    )


def test_a_state_of_another_version_is_refused_with_a_message(
    toy_model: Any, noise: Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may mean something else now; the message says why the run starts anew."""
    store = RunStore(tmp_path)
    stopped(store, toy_model(2, stop), noise)
    rewrite(next(tmp_path.iterdir()), lambda header: header.update(version=99))
    assert store.load(request()) is None
    assert "version 99, this is version 1" in caplog.text


def test_other_libraries_are_warned_of_and_the_run_goes_on(
    toy_model: Any, noise: Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Hours of work are worth more than the last bit."""
    store, model = RunStore(tmp_path), toy_model()
    stopped(store, toy_model(2, stop), noise)
    rewrite(next(tmp_path.iterdir()), lambda header: header["values"].update(made_with={"torch": "1.0"}))
    denoise(model, noise, stepper(), saving=SavedRun(store, request(), ON_STOP))
    assert "last bits may differ" in caplog.text
    assert model.calls == 2


def test_a_state_that_does_not_fit_its_request_is_passed_over(
    toy_model: Any, noise: Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A fingerprint that forgot the sampler costs a restart, not a crash or a wrong picture."""
    store, model = RunStore(tmp_path), toy_model()
    stopped(store, toy_model(2, stop), noise)
    denoise(model, noise, stepper("euler"), saving=SavedRun(store, request(), ON_STOP))
    assert "does not fit" in caplog.text
    assert model.calls == 4


def test_the_oldest_runs_make_room_but_never_the_one_being_written(tmp_path: Path) -> None:
    """The limit holds for all together."""
    size = RunStore(tmp_path / "one").save(request(), {"latents": torch.zeros(1000)}, {}).stat().st_size
    store = RunStore(tmp_path / "all", cap_bytes=2 * size + 50)
    for seed in range(4):
        path = store.save(request(seed=seed), {"latents": torch.zeros(1000)}, {"step": seed})
        os.utime(path, (1000 + seed, 1000 + seed))
    assert sorted(info.step for info in store.list_runs()) == [2, 3]
    small = RunStore(tmp_path / "all", cap_bytes=1)
    small.save(request(seed=0), {"latents": torch.zeros(1000)}, {"step": 7})
    assert [info.step for info in small.list_runs()] == [7]


def test_what_killed_writers_left_is_removed_after_an_hour(tmp_path: Path) -> None:
    """Not at once: another process may be writing it."""
    fresh, stale = tmp_path / ".writing-a", tmp_path / ".writing-b"
    for path in (fresh, stale):
        path.write_bytes(b"x")
    os.utime(stale, (1000, 1000))
    RunStore(tmp_path).save(request(), {"latents": torch.zeros(1)}, {})
    assert fresh.exists()
    assert not stale.exists()


@pytest.mark.parametrize("name", ["../other", "a/b", "", "run.safetensors", "C:x"])
def test_only_names_from_the_list_can_be_removed(name: str, tmp_path: Path) -> None:
    """No path leads out of the folder."""
    with pytest.raises(RequestError, match="name from the list"):
        RunStore(tmp_path).remove(name)


def test_a_folder_that_cannot_be_written_to_does_not_hide_why_a_run_was_left(
    toy_model: Any, noise: Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Saving on the way out only warns; saving after a slow step raises, before more hours are at stake."""
    (tmp_path / "file").write_text("not a folder")
    store = RunStore(tmp_path / "file")
    stopped(store, toy_model(2, stop), noise, ON_STOP)
    assert "could not be saved" in caplog.text
    with pytest.raises(WriteError, match="could not be saved"):
        denoise(toy_model(), noise, stepper(), saving=SavedRun(store, request(), EACH))


@pytest.mark.parametrize("name", ["a.safetensors", "a.latent"])
def test_saved_latents_are_read_back_as_they_were(name: str, noise: Tensor, tmp_path: Path) -> None:
    """In both forms, in a folder that is made if needed."""
    path = save_latents(tmp_path / "new" / name, noise, {"prompt": "{}"})
    assert torch.equal(read_latents(path), noise)
    assert list(path.parent.iterdir()) == [path]


def test_latents_cannot_be_saved_under_another_ending(noise: Tensor, tmp_path: Path) -> None:
    """A file that nothing reads is as good as lost."""
    with pytest.raises(RequestError, match=r"\.safetensors or \.latent"):
        save_latents(tmp_path / "a.pt", noise)
