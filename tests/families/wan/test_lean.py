"""Lean transformers give the bits of diffusers' forward with few tensors alive, and are as before afterwards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from lowmem_core.errors import RequestError
from lowmem_core.families.wan.lean import TIMESTEP_ROWS, distinct, lean
from lowmem_core.families.wan.passes import run_passes
from lowmem_core.families.wan.sampling import PassInputs
from lowmem_core.tiny import tiny_wan_config, tiny_wan_tensors

HEIGHT, WIDTH = 30, 46
FRAME_TOKENS = (HEIGHT // 2) * (WIDTH // 2)
IN_FLOAT = ("time_embedder", "scale_shift_table", "norm1", "norm2", "norm3")
KINDS = ("t2v", "i2v", "i2v_image", "ti2v")


def transformer(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a tiny transformer; what diffusers keeps in float32 stays so."""
    module = WanTransformer3DModel(**tiny_wan_config(kind).diffusers_arguments())
    module.load_state_dict(tiny_wan_tensors(kind, seed=3))
    for name, parameter in module.named_parameters():
        if not any(part in name for part in IN_FLOAT):
            parameter.data = parameter.data.to(dtype)
    return module.requires_grad_(False).eval()


def inputs(
    kind: str, dtype: torch.dtype = torch.float32, values: int = 2, frames: int = 3
) -> tuple[Tensor, Tensor, list[PassInputs]]:
    """Return latents, timesteps (per token for TI2V, of so many values) and two passes."""
    generator = torch.Generator().manual_seed(1)
    config = tiny_wan_config(kind)
    latents = torch.randn(1, config.in_channels, frames, HEIGHT, WIDTH, generator=generator).to(dtype)
    image = None
    if config.image_dim is not None:
        image = torch.randn(1, 257, config.image_dim, generator=generator).to(dtype)
    texts = [torch.randn(1, 512, config.text_dim, generator=generator).to(dtype) for _ in range(2)]
    timestep = torch.tensor([731.0])
    if config.has_timestep_per_token:
        choices = torch.linspace(0, 999.5, values)
        timestep = choices[torch.randint(values, (1, frames * FRAME_TOKENS), generator=generator)]
    return latents, timestep, [PassInputs(text, image) for text in texts]


def outputs(module: Any, given: tuple[Tensor, Tensor, list[PassInputs]]) -> list[Tensor]:
    """Return the prediction of each pass, one after the other."""
    latents, timestep, passes = given
    with torch.no_grad():
        return [module(latents, timestep, *told, return_dict=False)[0] for told in passes]


def in_step(module: Any, given: tuple[Tensor, Tensor, list[PassInputs]]) -> list[Tensor]:
    """Return the prediction of each pass, run in step."""
    with torch.no_grad():
        return run_passes(module, *given, poll=lambda: None)


def forwards(module: nn.Module) -> list[str]:
    """Return what modules hold that a clean one does not."""
    marks = ("forward", "_lowmem_lean")
    return [f"{name}.{mark}" for name, one in module.named_modules() for mark in marks if mark in one.__dict__]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_lean_transformers_give_the_bits_of_diffusers(kind: str, dtype: torch.dtype) -> None:
    """In chunks of every size, one pass at a time and both in step; inputs are not changed."""
    module, given = transformer(kind, dtype), inputs(kind, dtype)
    before = given[0].clone()
    expected = outputs(module, given)
    assert all(torch.equal(*pair) for pair in zip(in_step(module, given), expected, strict=True))
    for chunk_tokens in (64, 1024, 10**6):
        with lean(module, chunk_tokens):
            for found in (outputs(module, given), in_step(module, given)):
                assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), chunk_tokens
    assert torch.equal(given[0], before)
    assert forwards(module) == []
    assert all(torch.equal(*pair) for pair in zip(outputs(module, given), expected, strict=True))


def test_queries_in_several_chunks_attend_as_in_one_go() -> None:
    """There are more tokens than one chunk of queries takes."""
    module, given = transformer("t2v"), inputs("t2v", frames=7)
    expected = outputs(module, given)
    with lean(module, 1000):
        assert all(torch.equal(*pair) for pair in zip(outputs(module, given), expected, strict=True))


@pytest.mark.parametrize("values", [1, 2, 63, 64, 65, 500])
def test_any_number_of_timesteps_gives_the_bits_of_one_per_token(values: int) -> None:
    """Each is embedded once, in enough rows to keep bits."""
    module, given = transformer("ti2v"), inputs("ti2v", values=values)
    expected = outputs(module, given)
    with lean(module):
        assert all(torch.equal(*pair) for pair in zip(outputs(module, given), expected, strict=True))


def test_timesteps_are_embedded_once_each() -> None:
    """And their number is a multiple of what keeps bits."""
    timestep = inputs("ti2v", values=5)[1]
    values, index = distinct(timestep)
    assert len(values) == TIMESTEP_ROWS
    assert len(values.unique()) == 5
    assert torch.equal(values[index], timestep)


def test_few_tokens_keep_a_timestep_each() -> None:
    """Where one matrix product has no more rows than the other."""
    timestep = torch.tensor([[0.0, 7.0, 7.0, 3.0]])
    values, index = distinct(timestep)
    assert torch.equal(values[index], timestep)
    assert len(values) == 4


def test_hooks_on_blocks_and_layers_fire_as_ever() -> None:
    """Weights are moved by hooks, so a lean forward must not go around them."""
    module, given = transformer("t2v"), inputs("t2v")
    called: list[str] = []
    names = ["", "blocks.0", "blocks.6", "blocks.2.attn1.to_q", "blocks.2.ffn", "blocks.3.attn2.to_out.0", "proj_out"]
    for name in names:
        module.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: called.append(name))
    with lean(module):
        outputs(module, given)
    assert set(called) == set(names)
    assert called.count("blocks.0") == 2


class FailureError(Exception):
    """What a hook raises."""


@pytest.mark.parametrize("index", range(7))
def test_an_error_in_any_block_leaves_the_module_as_it_was(index: int) -> None:
    """And the next run is right."""
    module, given = transformer("t2v"), inputs("t2v")
    expected = outputs(module, given)

    def fail(*_: Any) -> None:
        raise FailureError

    handle = module.blocks[index].register_forward_hook(fail)
    with pytest.raises(FailureError), lean(module):
        in_step(module, given)
    handle.remove()
    assert forwards(module) == []
    with lean(module):
        assert all(torch.equal(*pair) for pair in zip(in_step(module, given), expected, strict=True))


@pytest.mark.parametrize("kind", ["t2v", "ti2v"])
def test_gradients_are_those_of_diffusers(kind: str) -> None:
    """Where they are wanted, diffusers' own forward runs."""
    module, (latents, timestep, passes) = transformer(kind), inputs(kind)
    gradients = []
    for context in (nullcontext(), lean(module)):
        with context, torch.enable_grad():
            leaf = latents.clone().requires_grad_()
            module(leaf, timestep, *passes[0], return_dict=False)[0].square().mean().backward()
            gradients.append(leaf.grad)
    assert torch.equal(*gradients)


def test_gradients_turned_on_within_a_run_do_no_harm() -> None:
    """A hook that turns them on in the middle changes no bit and leaves no graph."""
    module, given = transformer("ti2v"), inputs("ti2v")
    expected = outputs(module, given)
    grad = torch.enable_grad()
    module.blocks[1].register_forward_pre_hook(lambda *_: grad.__enter__())
    module.blocks[4].register_forward_hook(lambda *_: grad.__exit__(None, None, None))
    with lean(module):
        found = outputs(module, given)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert not any(one.requires_grad for one in found)


@pytest.fixture
def module() -> Any:
    """Return a transformer."""
    return transformer("t2v")


def nested(module: Any) -> AbstractContextManager[Any]:
    """Enter twice."""
    return lean(module)


def fused(module: Any) -> AbstractContextManager[Any]:
    """Fuse projections within."""
    module.blocks[2].attn1.fused_projections = True
    return lean(module)


def other_processor(module: Any) -> AbstractContextManager[Any]:
    """Put another attention processor there."""
    module.blocks[2].attn1.processor = object()
    return lean(module)


def patched(module: Any) -> AbstractContextManager[Any]:
    """Replace a forward as other packs do."""
    module.blocks[2].forward = lambda *_: None
    return lean(module)


def small_chunks(module: Any) -> AbstractContextManager[Any]:
    """Ask for chunks that would change bits."""
    return lean(module, 7)


REFUSED: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
    "fused": fused,
    "processor that lean": other_processor,
    "another forward is in the place": patched,
    "chunk is too small": small_chunks,
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_change_the_arithmetic_is_refused(message: str, module: Any) -> None:
    """And nothing stays attached."""
    context = REFUSED[message](module)
    held = forwards(module)
    with pytest.raises(RequestError, match=message), context:
        pass
    assert forwards(module) == held


def test_nesting_is_refused(module: Any) -> None:
    """The outer one goes on."""
    given = inputs("t2v")
    expected = outputs(module, given)
    with lean(module):
        with pytest.raises(RequestError, match="lean already"), lean(module):
            pass
        assert all(torch.equal(*pair) for pair in zip(outputs(module, given), expected, strict=True))
    assert forwards(module) == []


def test_only_plain_wan_transformers_can_be_lean() -> None:
    """Others have another forward."""
    with pytest.raises(RequestError, match="need a WanTransformer3DModel; have Linear"), lean(nn.Linear(1, 1)):
        pass


def test_weights_offloaded_by_diffusers_stay_under_its_hooks(module: Any) -> None:
    """Group offloading wraps forwards; ours takes the place of the innermost."""
    given = inputs("t2v")
    expected = outputs(module, given)
    module.enable_group_offload(
        onload_device=torch.device("cpu"), offload_type="block_level", num_blocks_per_group=2, use_stream=False
    )
    with lean(module):
        found = outputs(module, given)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("stop_at", range(0, 14, 3))
def test_runs_in_step_are_polled_before_each_block_of_each_pass(stop_at: int, module: Any) -> None:
    """Fourteen times for seven blocks and two passes."""
    left = stop_at

    def poll() -> None:
        nonlocal left
        if left == 0:
            raise FailureError
        left -= 1

    with pytest.raises(FailureError), torch.no_grad():
        run_passes(module, *inputs("t2v"), poll=poll)
    assert forwards(module) == []
    polls: list[int] = []
    with torch.no_grad():
        run_passes(module, *inputs("t2v"), poll=lambda: polls.append(1))
    assert len(polls) == 14
