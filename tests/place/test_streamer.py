"""Streaming gives the bits of the resident module, in slots of its own, and leaves the module as it was."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lowmem_core.errors import BudgetError, CheckpointError, RequestError
from lowmem_core.load.placeholder import is_placeholder, placeholder
from lowmem_core.memory import LiveStorageMeter, SimulatedMeter, fake_module, simulation
from lowmem_core.place import StreamedModule, StreamOptions, WeightStreamer, inventory_of, streamed
from lowmem_core.plan import plan_stream
from lowmem_core.weights import TensorLocation

CPU = torch.device("cpu")
POISON = StreamOptions(poison=True)


class Block(nn.Module):
    """A residual layer with a parameter, a bias and a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.register_buffer("shift", torch.randn(width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Add the layer's result."""
        return hidden + self.down(torch.tanh(self.up(hidden))) + self.shift


class Stack(nn.Module):
    """A root and several blocks."""

    def __init__(self, seed: int, blocks: int = 6, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 8)
        self.requires_grad_(False).eval()

    def forward(self, values: Tensor, fail_at: int | None = None) -> Tensor:
        """Run everything, or raise before block ``fail_at``."""
        hidden = self.embed(values)
        for index, block in enumerate(self.blocks):
            hidden = block(hidden)
            if index == fail_at:
                raise KeyboardInterrupt
        return self.head(hidden)


@pytest.fixture
def values() -> Tensor:
    """Return an input."""
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def stack() -> Iterator[Stack]:
    """Yield a module that must be as before after the test."""
    module = Stack(0)
    before = snapshot(module)
    yield module
    assert snapshot(module) == before
    assert all(not part._forward_pre_hooks and "forward" not in part.__dict__ for part in module.modules())


def snapshot(module: nn.Module) -> list[tuple[object, ...]]:
    """Return identity, storage and bytes of every tensor."""
    tensors = [*module.parameters(), *module.buffers()]
    return [(id(t), t.data_ptr(), t.stride(), bytes(t.contiguous().view(torch.uint8).numpy())) for t in tensors]


def small_plan(module: Stack, resident: int = 1) -> object:
    """Return a plan below half of the weights, with ``resident`` blocks."""
    inventory = inventory_of(module, module.blocks)
    limit = inventory.smallest_bytes + resident * inventory.block_bytes[0]
    assert limit < inventory.total_bytes * 0.65
    plan = plan_stream(inventory, limit)
    assert len(plan.resident) == resident
    return plan


@pytest.mark.parametrize("resident", [0, 1])
def test_streamed_equals_plain(stack: Stack, values: Tensor, resident: int) -> None:
    """Several runs through two slots give the bits of the plain module."""
    expected = stack(values)
    with streamed(stack, stack.blocks, small_plan(stack, resident), CPU, POISON) as streamer:
        for _ in range(3):
            assert torch.equal(stack(values), expected)
    assert streamer.statistics.copies == 3 * (6 - resident)


def test_everything_resident_copies_once(stack: Stack, values: Tensor) -> None:
    """With room for all, nothing is streamed."""
    expected = stack(values)
    plan = plan_stream(inventory_of(stack, stack.blocks), None)
    with streamed(stack, stack.blocks, plan, CPU, POISON) as streamer:
        assert torch.equal(stack(values), expected)
        assert torch.equal(stack(values), expected)
    assert (plan.slots, streamer.statistics.copies) == (0, 0)


def test_the_limit_holds_by_counting_storages(stack: Stack, values: Tensor) -> None:
    """Live storages on the device never pass the limit of the plan, plus the activations."""
    plan = small_plan(stack)
    meter = LiveStorageMeter(CPU, limit_bytes=plan.limit_bytes + 8192)
    with meter.measuring(), streamed(stack, stack.blocks, plan, CPU, POISON) as streamer:
        stack(values)
        assert plan.device_bytes <= meter.peak_bytes <= plan.limit_bytes + 8192
        assert streamer.device_bytes == plan.device_bytes <= plan.limit_bytes


def test_two_calls_of_a_block_share_one_copy(stack: Stack, values: Tensor) -> None:
    """Calling each block twice in a row copies it once."""
    expected = [stack(values), stack(-values)]
    with streamed(stack, stack.blocks, small_plan(stack, 0), CPU, POISON) as streamer:
        streamer.activate(stack)
        hidden = [stack.embed(values), stack.embed(-values)]
        for block in stack.blocks:
            hidden = [block(one) for one in hidden]
        assert all(torch.equal(stack.head(one), want) for one, want in zip(hidden, expected, strict=True))
    assert streamer.statistics.copies == 6


@pytest.mark.parametrize("fail_at", range(6))
def test_an_interrupt_at_any_block_leaves_nothing(stack: Stack, values: Tensor, fail_at: int) -> None:
    """After an exception in the middle, the next run in the same context and after it is right."""
    expected = stack(values)
    meter = LiveStorageMeter(CPU)
    with meter.measuring():
        with streamed(stack, stack.blocks, small_plan(stack), CPU, POISON):
            with pytest.raises(KeyboardInterrupt):
                stack(values, fail_at=fail_at)
            assert torch.equal(stack(values), expected)
        with pytest.raises(KeyboardInterrupt), streamed(stack, stack.blocks, small_plan(stack), CPU, POISON):
            stack(values, fail_at=fail_at)
        assert torch.equal(stack(values), expected)
        assert meter.live_bytes <= 4 * expected.nbytes


def test_a_released_block_is_nan(stack: Stack) -> None:
    """Whoever reads a weight outside its turn gets NaN, also through a stale view of its slot."""
    with streamed(stack, stack.blocks, small_plan(stack, 0), CPU, POISON):
        assert stack.blocks[2].up.weight.isnan().all()
        hidden = stack.blocks[0](torch.zeros(1, 32))
        stale = stack.blocks[0].up.weight.data
        assert not stale.isnan().any()
        stack.blocks[1](hidden)
        assert stale.isnan().all()
        assert stack.blocks[0].up.weight.isnan().all()


def test_blocks_may_run_in_any_order(stack: Stack, values: Tensor) -> None:
    """A block that was not expected is brought all the same."""
    hidden = stack.embed(values)
    expected = stack.blocks[1](stack.blocks[4](hidden))
    with streamed(stack, stack.blocks, small_plan(stack, 0), CPU, POISON):
        assert torch.equal(stack.blocks[1](stack.blocks[4](hidden)), expected)


def test_two_modules_share_slots(stack: Stack, values: Tensor) -> None:
    """Two modules run in turn in the memory of one, with the first block of the other announced."""
    other = Stack(7)
    expected = [stack(values), other(values)]
    specs = [StreamedModule(module, module.blocks, small_plan(module)) for module in (stack, other)]
    with WeightStreamer(specs, CPU, POISON) as streamer:
        for _ in range(2):
            streamer.announce(stack, other)
            assert torch.equal(stack(values), expected[0])
            assert torch.equal(other(values), expected[1])
        assert streamer.device_bytes == specs[0].plan.device_bytes


def test_one_module_is_streamed_once(stack: Stack) -> None:
    """A second placement of a module is refused and changes nothing."""
    with streamed(stack, stack.blocks, small_plan(stack), CPU):
        second = streamed(stack, stack.blocks, small_plan(stack), CPU)
        with pytest.raises(RequestError, match="already being streamed"):
            second.__enter__()
        assert not torch.isnan(stack(torch.zeros(1, 8))).any()


def test_two_threads_with_two_modules(values: Tensor) -> None:
    """Streams of two modules in two threads do not disturb each other."""
    stacks = [Stack(seed) for seed in (3, 4)]
    expected = [module(values) for module in stacks]
    wrong: list[int] = []

    def run(index: int) -> None:
        with torch.inference_mode():
            for _ in range(10):
                with streamed(stacks[index], stacks[index].blocks, small_plan(stacks[index]), CPU, POISON):
                    if not torch.equal(stacks[index](values), expected[index]):
                        wrong.append(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_modules_built_under_a_meta_patch_elsewhere_strand_nothing(stack: Stack, values: Tensor) -> None:
    """A host thread that patches parameter registration to meta does not reach into our placement."""
    expected = stack(values)
    original = nn.Module.register_parameter

    def to_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        original(self, name, None if parameter is None else nn.Parameter(parameter.to("meta")))

    nn.Module.register_parameter = to_meta
    try:
        with streamed(stack, stack.blocks, small_plan(stack), CPU, POISON):
            assert torch.equal(stack(values), expected)
    finally:
        nn.Module.register_parameter = original
    assert torch.equal(stack(values), expected)


def test_a_budget_below_two_blocks_says_the_smallest(stack: Stack) -> None:
    """The error names the smallest budget, and that one works."""
    inventory = inventory_of(stack, stack.blocks)
    with pytest.raises(BudgetError) as caught:
        plan_stream(inventory, inventory.smallest_bytes - 1)
    assert caught.value.smallest_bytes == inventory.smallest_bytes
    assert plan_stream(inventory, caught.value.smallest_bytes).device_bytes == inventory.smallest_bytes


def test_a_module_that_cannot_be_restored_is_invalidated(values: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """If putting a tensor back fails, whoever holds the module is told."""
    stack, lost = Stack(0), []
    spec = StreamedModule(stack, stack.blocks, small_plan(stack), invalidate=lambda: lost.append(True))
    with WeightStreamer([spec], CPU) as streamer:
        member = streamer._members[0]
        tensor, held, _ = member.originals[0]
        member.originals[0] = (tensor, held, torch.device("cuda", 99))
    assert lost == [True]


def test_a_disk_error_reaches_the_caller(stack: Stack, values: Tensor) -> None:
    """An error in the source is raised where the block is called, and the next run is right."""
    expected = stack(values)
    with streamed(stack, stack.blocks, small_plan(stack, 0), CPU, POISON) as streamer:
        source = streamer._members[0].source
        write, calls = source.write_entry, iter(range(100))

        def failing(entry: object, target: Tensor) -> None:
            if next(calls) == 20:
                raise CheckpointError("the disk is gone")
            write(entry, target)

        source.write_entry = failing
        with pytest.raises(CheckpointError, match="gone"):
            stack(values)
        assert torch.equal(stack(values), expected)


def on_disk(module: Stack, path: Path) -> dict[str, TensorLocation]:
    """Save ``module``, empty it, and return where its tensors are."""
    save_file({name: tensor.contiguous() for name, tensor in module.state_dict().items()}, path)
    header_bytes = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + header_bytes])
    locations = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        begin, end = header[name]["data_offsets"]
        locations[name] = TensorLocation(path, 8 + header_bytes + begin, end - begin, "F32", tuple(tensor.shape))
        tensor.data = placeholder(tensor.shape, tensor.dtype)
    return locations


def test_weights_on_disk_are_read_ahead_by_a_thread(values: Tensor, tmp_path: Path) -> None:
    """A module whose weights stay in their file gives the same bits, and only the first block is waited for."""
    expected, module = Stack(0)(values), Stack(0)
    locations = on_disk(module, tmp_path / "stack.safetensors")
    spec = StreamedModule(module, module.blocks, small_plan(module, 0), locations)
    with torch.inference_mode(), WeightStreamer([spec], CPU) as streamer:
        for _ in range(3):
            assert torch.equal(module(values), expected)
        assert not streamer.is_synchronous
    assert streamer.statistics.misses == 1
    assert is_placeholder(module.blocks[0].up.weight)


def test_a_file_cut_off_during_a_run_is_an_error_that_names_it(values: Tensor, tmp_path: Path) -> None:
    """The reader thread's error arrives at the block that needs the bytes."""
    module, path = Stack(0), tmp_path / "stack.safetensors"
    spec = StreamedModule(module, module.blocks, small_plan(module, 0), on_disk(module, path))
    with WeightStreamer([spec], CPU):
        module(values)
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)
        with pytest.raises(CheckpointError, match=r"stack\.safetensors ended while it was read"):
            module(values)


def test_a_simulated_gpu_holds_what_the_plan_says() -> None:
    """Under simulation the weights of a large stack take the planned bytes, to the byte."""
    meter = SimulatedMeter()
    with simulation(), torch.inference_mode():
        module = fake_module(lambda: Stack(0, blocks=8, width=1024), device="cpu")
        inventory = inventory_of(module, module.blocks)
        plan = plan_stream(inventory, inventory.smallest_bytes + inventory.block_bytes[0])
        hidden = torch.empty(4, 8, dtype=torch.bfloat16, device="cuda")
        with meter.measuring(), streamed(module, module.blocks, plan, torch.device("cuda")):
            assert meter.live_bytes - plan.device_bytes < 512 * len(list(module.parameters())) * 2
            assert module(hidden).device.type == "cuda"
        assert all(tensor.device.type == "cpu" for tensor in module.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pinned", [True, False])
def test_streamed_on_a_gpu_equals_resident_there(pinned: bool) -> None:
    """On CUDA, streaming gives the bits of the module on the device, from pinned and from pageable memory."""
    device, module = torch.device("cuda"), Stack(0, blocks=12, width=512)
    values = torch.randn(64, 8, device=device)
    expected = Stack(0, blocks=12, width=512).to(device)(values)
    before = torch.cuda.memory_allocated()
    options = StreamOptions(pinned=pinned)
    with torch.inference_mode(), streamed(module, module.blocks, small_plan(module), device, options) as streamer:
        for _ in range(5):
            assert torch.equal(module(values), expected)
        assert not streamer.is_synchronous
    assert streamer.statistics.misses == 1
    assert torch.cuda.memory_allocated() == before
