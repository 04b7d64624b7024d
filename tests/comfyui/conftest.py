"""What the tests with a real ComfyUI share.

They run when ``COMFYUI_PATH`` names a checkout, or ``~/comfy/ComfyUI`` exists, in an environment with its
requirements. The folder must not be called ``nodes``: pytest would register that name, which is ComfyUI's.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import types
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACK = "lowmem_pack_under_test"
START_S = 300.0
RUN_S = 240.0
MODEL_FOLDERS = ("vae", "diffusion_models", "text_encoders", "loras")
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
    for name in (*(f"models/{kind}" for kind in MODEL_FOLDERS), "input", "output", "temp", "custom_nodes", "user"):
        (base / name).mkdir(parents=True)
    subprocess.run([sys.executable, "-c", MAKE_TINY, str(base)], cwd=ROOT, check=True, capture_output=True)
    (base / "custom_nodes" / "lowmem").symlink_to(ROOT, target_is_directory=True)
    return base


@pytest.fixture(scope="session")
def pack(comfyui_path: Path, base_directory: Path) -> Iterator[types.ModuleType]:
    """Load the pack by path as ComfyUI does, with its folders in ``base_directory``."""
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(comfyui_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("comfy.cli_args").args.cpu = True
        importlib.import_module("utils.install_util")
        server = importlib.import_module("server")
        spec = importlib.util.spec_from_file_location(
            PACK, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules[PACK] = module
        spec.loader.exec_module(module)
    assert hasattr(server, "PromptServer")
    folders = importlib.import_module("folder_paths")
    folders.set_output_directory(str(base_directory / "output"))
    folders.set_temp_directory(str(base_directory / "temp"))
    folders.set_user_directory(str(base_directory / "user"))
    for kind in MODEL_FOLDERS:
        folders.add_model_folder_path(kind, str(base_directory / "models" / kind), is_default=True)
    yield module
    patch.undo()


@pytest.fixture(scope="session")
def nodes(pack: types.ModuleType) -> dict[str, Any]:
    """Return the node classes by id, as the entry point gives them."""

    async def listed() -> list[Any]:
        extension = await pack.comfy_entrypoint()
        return await extension.get_node_list()

    return {node.define_schema().node_id: node for node in asyncio.run(listed())}


@pytest.fixture(scope="module")
def server(comfyui_path: Path, base_directory: Path) -> Iterator[ComfyServer]:
    """Return a server that is ready, with a log of its own."""
    started = ComfyServer(comfyui_path, base_directory)
    try:
        started.wait_until_ready()
        yield started
    finally:
        started.stop()
