"""What the tests with a real ComfyUI share.

They run when ``COMFYUI_PATH`` names a checkout, or ``~/comfy/ComfyUI`` exists, in an environment with its
requirements. The folder must not be called ``nodes``: pytest would register that name, which is ComfyUI's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKE_TINY = "import sys; from lowmem_core.cli import main; sys.exit(main(['tiny', '--comfyui', sys.argv[1]]))"


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
