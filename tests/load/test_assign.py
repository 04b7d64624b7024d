"""Weights go into a skeleton strictly: by name, shape and dtype."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from lowmem_core.errors import CheckpointError
from lowmem_core.load import assign_tensors, build_skeleton
from lowmem_core.weights import Checkpoint

RENAME = {"w": "weight", "b": "bias"}


def skeleton() -> nn.Linear:
    """Return an empty layer."""
    return build_skeleton(nn.Linear, {"in_features": 3, "out_features": 2})


def checkpoint(**tensors: torch.Tensor) -> Checkpoint:
    """Return a checkpoint for the layer under foreign names, with ``tensors`` in place of some."""
    return Checkpoint.of_tensors({"w": torch.ones(2, 3), "b": torch.zeros(2), **tensors}, "toy")


def test_tensors_are_placed_under_our_names_without_gradients() -> None:
    """The module runs after assignment."""
    layer = skeleton()
    assign_tensors(layer, checkpoint(), RENAME)
    assert torch.equal(layer(torch.ones(1, 3)), torch.full((1, 2), 3.0))
    assert not any(parameter.requires_grad for parameter in layer.parameters())


def test_tensors_of_the_wanted_dtype_are_shared() -> None:
    """Nothing is copied that need not be."""
    weight = torch.ones(2, 3)
    layer = skeleton()
    assign_tensors(layer, checkpoint(w=weight), RENAME, torch.float32)
    assert layer.weight.data_ptr() == weight.data_ptr()


def test_tensors_of_another_dtype_are_converted() -> None:
    """The module has the dtype that was asked for."""
    layer = skeleton()
    assign_tensors(layer, checkpoint(), RENAME, torch.bfloat16)
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.bfloat16}


def test_buffers_are_filled_as_buffers() -> None:
    """Running statistics are not turned into parameters."""
    norm = build_skeleton(nn.BatchNorm1d, {"num_features": 2, "affine": False, "track_running_stats": True})
    del norm.num_batches_tracked
    tensors = {"running_mean": torch.ones(2), "running_var": torch.ones(2)}
    assign_tensors(norm, Checkpoint.of_tensors(tensors, "toy"))
    assert torch.equal(norm.running_mean, torch.ones(2))
    assert list(norm.parameters()) == []


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x": torch.ones(1)}, "1 unexpected: x"),
        ({"w": torch.ones(3, 2)}, "1 of another shape: w (weight) is [3, 2], not [2, 3]"),
        ({"w": torch.ones(2, 3, dtype=torch.int8)}, "w (weight) is I8"),
        ({"w": torch.ones(2, 3).to(torch.float8_e4m3fn)}, "w (weight) is F8_E4M3"),
    ],
)
def test_what_does_not_fit_is_named_under_both_names(tensors: dict[str, torch.Tensor], message: str) -> None:
    """The user sees the name in the file and the name in the model."""
    with pytest.raises(CheckpointError, match=re.escape(message)):
        assign_tensors(skeleton(), checkpoint(**tensors), RENAME)


def test_missing_tensors_are_named_and_the_module_is_unchanged() -> None:
    """A file without a bias leaves the skeleton as it was."""
    layer = skeleton()
    with pytest.raises(CheckpointError, match=re.escape("1 missing: b (bias)")):
        assign_tensors(layer, Checkpoint.of_tensors({"w": torch.ones(2, 3)}, "toy"), RENAME)
    assert layer.weight.is_meta


def test_long_lists_are_cut() -> None:
    """A wholly foreign file does not fill the screen."""
    foreign = {f"x{index}": torch.ones(1) for index in range(9)}
    with pytest.raises(CheckpointError, match="9 unexpected: x0, x1, x2, x3 and 5 more"):
        assign_tensors(skeleton(), Checkpoint.of_tensors(foreign, "toy"))


def test_two_tensors_for_one_place_are_refused() -> None:
    """A map that sends two names to one would lose one of them."""
    with pytest.raises(CheckpointError, match="a second weight"):
        assign_tensors(skeleton(), checkpoint(v=torch.ones(2, 3)), {**RENAME, "v": "weight"})


def test_meta_buffers_that_no_file_holds_are_refused() -> None:
    """A buffer that is not saved would stay without values and fail much later."""
    layer = skeleton()
    layer.register_buffer("table", torch.empty(1, device="meta"), persistent=False)
    with pytest.raises(CheckpointError, match="table"):
        assign_tensors(layer, checkpoint(), RENAME)
