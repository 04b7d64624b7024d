"""What is installed, what is promised in the metadata, and what an import costs."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lowmem_core

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - 3.10 only
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(lowmem_core.__path__, "lowmem_core.")
    if not info.name.endswith("__main__")
)


def python(code: str, cwd: Path) -> str:
    """Run ``code`` in a fresh isolated interpreter inside ``cwd`` and return what it printed."""
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=cwd, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_requirements_equal_the_dependencies() -> None:
    """ComfyUI-Manager reads requirements.txt, pip reads pyproject.toml: they must say the same."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").split()
    assert lines == PROJECT["dependencies"]


def test_the_pack_never_installs_torch() -> None:
    """Pulling torch into a ComfyUI installation replaces the build that fits the user's GPU."""
    names = {re.split(r"[^A-Za-z0-9_-]", line)[0].lower() for line in PROJECT["dependencies"]}
    assert names & {"torch", "torchvision", "torchaudio", "xformers"} == set()


def test_one_version() -> None:
    """The package and its metadata agree on the version."""
    assert lowmem_core.__version__ == PROJECT["version"]


def test_import_is_cheap(tmp_path: Path) -> None:
    """Importing the package loads no model library."""
    heavy = "{'torch', 'diffusers', 'transformers', 'accelerate', 'av', 'numpy'}"
    code = f"import sys, lowmem_core; print(sorted({heavy} & set(sys.modules)))"
    assert python(code, tmp_path) == "[]"


def test_only_the_core_is_installed(tmp_path: Path) -> None:
    """Our ``nodes`` and ``web`` folders would shadow ComfyUI's own ``nodes`` module."""
    code = "from importlib.util import find_spec; print([n for n in ('nodes', 'web') if find_spec(n)])"
    assert python(code, tmp_path) == "[]"


@pytest.mark.parametrize("name", MODULES)
def test_all_is_true(name: str) -> None:
    """Every name in ``__all__`` exists (ruff keeps the list in order)."""
    module = importlib.import_module(name)
    assert [item for item in getattr(module, "__all__", []) if not hasattr(module, item)] == []


def test_root_init_needs_no_comfyui() -> None:
    """Collectors that import the repository root must not need a host."""
    if "server" in sys.modules:
        pytest.skip("a ComfyUI server module is loaded in this process")
    spec = importlib.util.spec_from_file_location("lowmem_root", ROOT / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.WEB_DIRECTORY == "./web"
    assert not hasattr(module, "comfy_entrypoint")


def test_source_files_are_ascii() -> None:
    """Some Windows hosts read sources as cp1252."""
    files = [path for folder in ("lowmem_core", "nodes", "tests") for path in (ROOT / folder).rglob("*.py")]
    assert [path for path in [*files, ROOT / "__init__.py"] if not path.read_bytes().isascii()] == []
