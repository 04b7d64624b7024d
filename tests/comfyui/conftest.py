"""What the tests with a real ComfyUI share.

They run when ``COMFYUI_PATH`` names a checkout, or ``~/comfy/ComfyUI`` exists, in an environment with its
requirements. The folder must not be called ``nodes``: pytest would register that name, which is ComfyUI's.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
START_S = 300.0
RUN_S = 240.0
FLAGS = [
    "--cpu",
    "--disable-auto-launch",
    "--disable-api-nodes",
    "--database-url=sqlite:///:memory:",
    "--disable-all-custom-nodes",
    "--whitelist-custom-nodes=lowmem",
]
MAKE_TINY = "import sys; from lowmem_core.cli import main; sys.exit(main(['tiny', '--comfyui', sys.argv[1]]))"


class ComfyServer:
    """A ComfyUI server on a free port of this machine.

    Args:
        comfyui_path: The checkout.
        base: Its base directory, with our pack in ``custom_nodes``.
    """

    def __init__(self, comfyui_path: Path, base: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.base = base
        self.log = base / "server.log"
        command = [sys.executable, "main.py", *FLAGS, "--port", str(self.port), "--base-directory", str(base)]
        with self.log.open("wb") as log:
            environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
            self.process = subprocess.Popen(
                command, cwd=comfyui_path, stdout=log, stderr=subprocess.STDOUT, env=environment
            )

    def call(self, path: str, payload: Any = None) -> Any:
        """GET ``path``, or POST ``payload`` to it, and return the JSON answer."""
        data = None if payload is None else json.dumps(payload).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def wait_until_ready(self) -> None:
        """Return when the server answers; show its log if it ends instead."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                self.call("/system_stats")
            except OSError:
                time.sleep(0.5)
            else:
                return
        pytest.fail(f"the server did not start:\n{self.log.read_text(errors='replace')[-4000:]}")

    def post(self, prompt: dict[str, Any]) -> str:
        """Queue ``prompt`` and return its id."""
        workflow = {"extra_pnginfo": {"workflow": {"nodes": []}}}
        return str(self.call("/prompt", {"prompt": prompt, "extra_data": workflow})["prompt_id"])

    def finished(self, prompt_id: str) -> dict[str, Any]:
        """Wait for the prompt and return its history entry."""
        deadline = time.monotonic() + RUN_S
        while time.monotonic() < deadline:
            history = self.call(f"/history/{prompt_id}")
            if prompt_id in history:
                return dict(history[prompt_id])
            time.sleep(0.1)
        pytest.fail(f"the prompt did not finish:\n{self.log.read_text(errors='replace')[-4000:]}")

    def stop(self) -> None:
        """End the server."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder as ``host``."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.host)


@pytest.fixture(scope="session")
def comfyui_path() -> Path:
    """Return the ComfyUI checkout, or skip."""
    path = Path(os.environ.get("COMFYUI_PATH") or Path.home() / "comfy" / "ComfyUI")
    if not (path / "main.py").is_file():
        pytest.skip(f"no ComfyUI at {path}; set COMFYUI_PATH")
    pytest.importorskip("aiohttp", reason="ComfyUI's requirements are not installed")
    return path.resolve()


@pytest.fixture(scope="session")
def base_directory(comfyui_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a ComfyUI base directory with the pack and what ``lowmem tiny --comfyui`` puts there."""
    base = tmp_path_factory.mktemp("comfyui")
    for name in ("models/vae", "input", "output", "temp", "custom_nodes", "user"):
        (base / name).mkdir(parents=True)
    subprocess.run([sys.executable, "-c", MAKE_TINY, str(base)], cwd=ROOT, check=True, capture_output=True)
    (base / "custom_nodes" / "lowmem").symlink_to(ROOT, target_is_directory=True)
    return base


@pytest.fixture(scope="module")
def server(comfyui_path: Path, base_directory: Path) -> Iterator[ComfyServer]:
    """Return a server that is ready, with a log of its own."""
    started = ComfyServer(comfyui_path, base_directory)
    try:
        started.wait_until_ready()
        yield started
    finally:
        started.stop()
