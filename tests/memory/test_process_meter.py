"""The process as the system sees it, the meter that sees nothing, and torch's own counters."""

from __future__ import annotations

import builtins
import mmap
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lowmem_core import memory
from lowmem_core.errors import MissingDependencyError
from lowmem_core.memory import CudaMeter, LiveStorageMeter, MemoryMeter, NullMeter, ProcessMeter, process_meter
from lowmem_core.units import MiB


def test_an_allocation_is_seen_and_its_peak_stays() -> None:
    """64 MiB of touched memory raise live and peak; after it is freed only the peak remembers."""
    meter = ProcessMeter(sample_seconds=0.002)
    before = meter.live_bytes
    with meter.measuring(), meter.measuring():
        block = mmap.mmap(-1, 64 * MiB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block.write(b"x" * (64 * MiB))
        time.sleep(0.05)
        block.close()
    assert meter.peak_bytes - before >= 63 * MiB
    assert meter.live_bytes - before < 32 * MiB
    meter.reset_peak()
    assert meter.peak_bytes - before < 32 * MiB


@pytest.mark.skipif(not process_meter.STATUS.exists(), reason="needs /proc")
def test_mapped_files_are_told_apart(tmp_path: Path) -> None:
    """Pages of a mapped file can be dropped by the system, so they are no part of the live figure."""
    path = tmp_path / "weights.bin"
    path.write_bytes(b"x" * (32 * MiB))
    meter = ProcessMeter()
    anonymous, mapped = meter.live_bytes, meter.file_bytes or 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert sum(pages[offset] for offset in range(0, len(pages), mmap.PAGESIZE)) > 0
        assert (meter.file_bytes or 0) - mapped >= 31 * MiB
        assert meter.live_bytes - anonymous < 16 * MiB


def test_the_sampling_thread_ends() -> None:
    """Nothing runs on after the last exit, also when the step failed."""
    meter = ProcessMeter()
    with pytest.raises(KeyError), meter.measuring():
        raise KeyError
    assert meter._thread is not None
    assert not meter._thread.is_alive()


def test_other_systems_are_read_with_psutil(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without /proc the resident size is taken, and no file share is claimed."""
    pytest.importorskip("psutil")
    monkeypatch.setattr(process_meter, "STATUS", tmp_path / "absent")
    reading = process_meter.read_process_memory()
    assert reading.anonymous_bytes > 10 * MiB
    assert reading.file_bytes is None


def test_a_missing_psutil_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A kernel that gives no figures and no psutil: the error says what to install."""
    status, real = tmp_path / "status", builtins.__import__
    status.write_text("VmRSS:  100 kB\n")
    monkeypatch.setattr(process_meter, "STATUS", status)

    def refuse(name: str, *args: object, **kwargs: object) -> object:
        if name == "psutil":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingDependencyError, match="pip install psutil"):
        process_meter.read_process_memory()


def test_the_null_meter_claims_nothing() -> None:
    """Nothing measured is None, never the plan."""
    meter = NullMeter()
    with meter.measuring(), meter.host_allocation():
        meter.track([torch.ones(3)])
    meter.reset_peak()
    figures = {meter.measured_by, meter.live_bytes, meter.peak_bytes, meter.host_live_bytes, meter.host_peak_bytes}
    assert figures == {None}


def test_each_meter_names_its_method() -> None:
    """Reports state how a figure was found."""
    meters: list[MemoryMeter] = [NullMeter(), CudaMeter("cuda"), LiveStorageMeter(), ProcessMeter()]
    assert [meter.measured_by for meter in meters] == [None, "cuda", "live-storage", "rss"]


@pytest.mark.gpu
def test_cuda_counters_are_read() -> None:
    """The peak remembers a freed tensor until it is reset."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    meter = CudaMeter("cuda")
    meter.reset_peak()
    before = meter.live_bytes
    with meter.measuring(), meter.host_allocation():
        torch.ones(MiB, device="cuda")
    assert meter.peak_bytes - before >= 4 * MiB
    meter.reset_peak()
    assert meter.peak_bytes == meter.live_bytes


def test_every_public_name_resolves_and_torch_waits() -> None:
    """The package's import loads no torch; each exported name is there when asked for."""
    assert memory.__all__ == sorted(memory.__all__)
    assert all(getattr(memory, name) is not None for name in memory.__all__)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        memory.nothing_like_it  # noqa: B018
    code = "import sys, lowmem_core.memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
