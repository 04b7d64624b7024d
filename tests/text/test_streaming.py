"""The encoder's blocks are streamed under a limit, with the same bits, and the module is left as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowmem_core.errors import BudgetError, CheckpointError, RequestError
from lowmem_core.memory import LiveStorageMeter
from lowmem_core.place import StreamOptions
from lowmem_core.text import EncodeOptions, LoadedTextEncoder, encode_prompts, load_text_encoder, plan_text
from lowmem_core.tiny import UMT5_KINDS, write_tiny_umt5

Written = Callable[[str, torch.dtype], Path]
LENGTH = 16
PROMPTS = ("a red boat", "", "the cat on the waves " * 9)
POISON = StreamOptions(pinned=False, poison=True)
RESIDENT = EncodeOptions(LENGTH, limit_bytes=None)


def tight(loaded: LoadedTextEncoder) -> EncodeOptions:
    """Return options with the smallest limit that works, slots poisoned."""
    with pytest.raises(BudgetError) as caught:
        plan_text(loaded, len(PROMPTS), EncodeOptions(LENGTH, limit_bytes=1))
    assert caught.value.smallest_bytes is not None
    return EncodeOptions(LENGTH, limit_bytes=caught.value.smallest_bytes, stream=POISON)


def state(loaded: LoadedTextEncoder) -> list[Any]:
    """Return what must be the same after a run: tensors by identity and place, hooks, attributes."""
    tensors = [(name, id(one), one.data_ptr(), one.device) for name, one in loaded.stack.named_parameters()]
    modules = [(name, len(one._forward_pre_hooks), sorted(one.__dict__)) for name, one in loaded.stack.named_modules()]
    return [tensors, modules]


@pytest.mark.parametrize("from_disk", [True, False], ids=["disk", "host"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", UMT5_KINDS)
def test_the_smallest_limit_gives_the_same_bits(
    kind: str, dtype: torch.dtype, from_disk: bool, written: Written
) -> None:
    """Two slots for six blocks, less than half of the weights on the device, freed slots full of NaN."""
    loaded = load_text_encoder(written(kind, torch.bfloat16), dtype, from_disk=from_disk)
    before, want = state(loaded), encode_prompts(PROMPTS, loaded, "cpu", RESIDENT)
    stream = plan_text(loaded, len(PROMPTS), tight(loaded)).stream
    whole = plan_text(loaded, len(PROMPTS), RESIDENT).stream
    assert (len(stream.streamed), stream.slots) == (6, 2)
    assert stream.device_bytes < whole.device_bytes / 2
    got = encode_prompts(PROMPTS, loaded, "cpu", tight(loaded))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert state(loaded) == before


@pytest.mark.parametrize("length", [16, 200])
@pytest.mark.parametrize("kind", ["comfyui", "comfyui_fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_measured_is_planned_at_most_and_within_the_limit(
    kind: str, dtype: torch.dtype, length: int, written: Written
) -> None:
    """Weights, slots and activations together, whichever dominates; an operator that passed the limit would raise."""
    loaded = load_text_encoder(written(kind, dtype), dtype)
    options = replace(tight(loaded), max_length=length)
    smallest = plan_text(loaded, len(PROMPTS), replace(options, limit_bytes=None)).activation_bytes
    options = replace(
        options, limit_bytes=smallest + plan_text(loaded, len(PROMPTS), tight(loaded)).stream.device_bytes
    )
    planned = plan_text(loaded, len(PROMPTS), options).planned_peak_bytes
    assert options.limit_bytes is not None
    meter = LiveStorageMeter("cpu", limit_bytes=options.limit_bytes)
    with meter.measuring():
        encode_prompts(PROMPTS, loaded, "cpu", options)
    assert meter.peak_bytes <= planned <= options.limit_bytes


def test_a_limit_below_two_blocks_is_refused_with_the_smallest(written: Written) -> None:
    """Before anything is placed; the limit that the message names works."""
    loaded = load_text_encoder(written("comfyui", torch.bfloat16))
    options = tight(loaded)
    assert options.limit_bytes is not None
    with pytest.raises(BudgetError, match=rf"{options.limit_bytes} bytes.*Raise the budget"):
        encode_prompts(PROMPTS, loaded, "cpu", replace(options, limit_bytes=options.limit_bytes - 1))


def test_more_room_keeps_blocks_resident(written: Written) -> None:
    """A plan between the extremes gives the same bits too."""
    loaded = load_text_encoder(written("comfyui", torch.float32), torch.float32)
    options = tight(loaded)
    assert options.limit_bytes is not None
    roomy = replace(options, limit_bytes=options.limit_bytes + 110_000)
    plan = plan_text(loaded, len(PROMPTS), roomy)
    assert 0 < len(plan.stream.resident) < 6
    assert "streamed through 2 slots" in str(plan)
    got, want = (encode_prompts(PROMPTS, loaded, "cpu", one) for one in (roomy, RESIDENT))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("from_disk", [True, False], ids=["disk", "host"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_stop_before_any_block_leaves_the_module_as_it_was(
    error: type[BaseException], from_disk: bool, written: Written
) -> None:
    """For each prompt in each block; the next run is right."""
    loaded = load_text_encoder(written("comfyui", torch.bfloat16), from_disk=from_disk)
    before, want = state(loaded), encode_prompts(PROMPTS, loaded, "cpu", RESIDENT)
    for stop in range(6 * len(PROMPTS)):
        calls = iter(range(100))

        def poll(calls: Any = calls, stop: int = stop) -> None:
            if next(calls) == stop:
                raise error

        with pytest.raises(error):
            encode_prompts(PROMPTS, loaded, "cpu", replace(tight(loaded), poll=poll))
        assert state(loaded) == before
    got = encode_prompts(PROMPTS, loaded, "cpu", tight(loaded))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_failure_inside_any_block_leaves_the_module_as_it_was(written: Written) -> None:
    """As an out-of-memory would."""
    loaded = load_text_encoder(written("comfyui", torch.bfloat16))
    before = state(loaded)
    for block in loaded.stack.get_submodule("block").children():

        def fail(*_: object) -> None:
            raise torch.OutOfMemoryError("here")

        handle = block.get_submodule("layer.1").register_forward_pre_hook(fail)
        with pytest.raises(torch.OutOfMemoryError):
            encode_prompts(PROMPTS, loaded, "cpu", tight(loaded))
        handle.remove()
        assert state(loaded) == before


def test_a_file_cut_off_after_loading_is_noticed(tmp_path: Path) -> None:
    """The error names the file, and the module is as before."""
    path = write_tiny_umt5(tmp_path)
    loaded = load_text_encoder(path)
    before = state(loaded)
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(CheckpointError, match="umt5_tiny"):
        encode_prompts(PROMPTS, loaded, "cpu", tight(loaded))
    assert state(loaded) == before


def test_the_token_table_is_never_loaded(tmp_path: Path) -> None:
    """It is a fifth of the model; also a map of the file would count as memory."""
    path = write_tiny_umt5(tmp_path)
    tensors = load_file(path)
    tensors["shared.weight"] = torch.cat([tensors["shared.weight"], torch.zeros(500_000, 32, dtype=torch.bfloat16)])
    save_file(tensors, path)
    loaded = load_text_encoder(path)
    meter = LiveStorageMeter("cpu")
    with meter.measuring():
        encode_prompts(PROMPTS, loaded, "cpu", tight(loaded))
    assert meter.peak_bytes + meter.host_peak_bytes <= plan_text(loaded, len(PROMPTS), tight(loaded)).planned_peak_bytes


def test_an_encoder_in_use_is_not_streamed_twice(written: Written) -> None:
    """The second run is told so; the first goes on."""
    loaded = load_text_encoder(written("comfyui", torch.bfloat16))

    def again() -> None:
        with pytest.raises(RequestError, match="already being streamed"):
            encode_prompts(["x"], loaded, "cpu", RESIDENT)

    want = encode_prompts(PROMPTS, loaded, "cpu", RESIDENT)
    got = encode_prompts(PROMPTS, loaded, "cpu", replace(tight(loaded), poll=again))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_two_threads_with_two_encoders_do_not_disturb_each_other(written: Written) -> None:
    """Each gets its own bits."""
    encoders = [load_text_encoder(written("comfyui", dtype), dtype) for dtype in (torch.float32, torch.bfloat16)]
    want = [encode_prompts(PROMPTS, one, "cpu", RESIDENT) for one in encoders]
    got: dict[int, list[torch.Tensor]] = {}

    def work(index: int) -> None:
        for _ in range(3):
            got[index] = encode_prompts(PROMPTS, encoders[index], "cpu", tight(encoders[index]))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for index in range(2) for a, b in zip(got[index], want[index], strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", UMT5_KINDS)
def test_streaming_on_a_gpu_gives_the_resident_bits(kind: str, written: Written) -> None:
    """Copies on a side stream, slots poisoned."""
    loaded = load_text_encoder(written(kind, torch.bfloat16))
    got, want = (encode_prompts(PROMPTS, loaded, "cuda", one) for one in (tight(loaded), RESIDENT))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
