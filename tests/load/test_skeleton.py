"""Skeletons hold no memory and disturb no other thread."""

from __future__ import annotations

import threading

import torch
from torch import nn

from lowmem_core.load import build_skeleton


def test_a_skeleton_is_on_meta_and_in_eval_mode() -> None:
    """A model of any size is built without memory."""
    layer = build_skeleton(nn.Linear, {"in_features": 1 << 20, "out_features": 1 << 20})
    assert layer.weight.is_meta
    assert not layer.training


def test_other_threads_still_build_real_modules() -> None:
    """The host may build a model of its own while we build a skeleton."""
    inside, built, devices = threading.Event(), threading.Event(), []

    def slow_class() -> nn.Linear:
        inside.set()
        assert built.wait(10)
        return nn.Linear(2, 2)

    def other_thread() -> None:
        assert inside.wait(10)
        devices.append(nn.Linear(2, 2).weight.device.type)
        built.set()

    thread = threading.Thread(target=other_thread)
    thread.start()
    skeleton = build_skeleton(slow_class, {})
    thread.join()
    assert (devices, skeleton.weight.device.type) == (["cpu"], "meta")


def test_modules_built_afterwards_are_real() -> None:
    """The device is set only while the skeleton is built."""
    build_skeleton(nn.Linear, {"in_features": 1, "out_features": 1})
    assert torch.empty(1).device.type == "cpu"
