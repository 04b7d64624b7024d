"""Imports in the core point strictly downward, are relative, and never reach the host."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "lowmem_core"

LAYERS = (
    {"", "errors"},
    {"units", "host", "shapes", "frames"},
    {"request"},
    {"memory"},
    {"weights"},
    {"plan"},
    {"load", "hooks"},
    {"place", "chunking", "vae"},
    {"denoise", "decode", "write"},
    {"families", "text"},
    {"tiny"},
    {"pipeline"},
    {"cli"},
)
RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}
HOST_MODULES = {"comfy", "comfy_api", "comfy_execution", "folder_paths", "nodes", "server", "execution"}
SOURCES = sorted(CORE.rglob("*.py"))


class Import(NamedTuple):
    """One imported module: a part of the core (``top``) or a foreign package (``foreign``)."""

    line: int
    top: str | None
    foreign: str | None


def part_of(path: Path) -> str:
    """Return the part of the core that ``path`` belongs to: its top module or package, "" for the root."""
    first = path.relative_to(CORE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imports_of(path: Path) -> Iterator[Import]:
    """Yield every import of ``path``, also those inside functions and ``TYPE_CHECKING`` blocks."""
    package = ["lowmem_core", *path.relative_to(CORE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, None, alias.name.split(".")[0])
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield Import(node.lineno, None, str(node.module).split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] + (node.module or "").split(".")
            base = [name for name in base if name]
            for alias in node.names:
                inner = [*base, alias.name][1:]
                yield Import(node.lineno, inner[0] if inner and inner[0] in RANKS else "", None)


def test_every_part_of_the_core_has_a_layer() -> None:
    """A new module or package must be given its place before it can be imported."""
    assert {part_of(path) for path in SOURCES} <= set(RANKS)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(CORE)))
def test_imports_point_downward(path: Path) -> None:
    """A part imports itself or a lower layer, never its own level or a higher one."""
    own = part_of(path)
    bad = [
        f"line {found.line}: {own or 'lowmem_core'} imports {found.top}"
        for found in imports_of(path)
        if found.top is not None and found.top != own and RANKS[found.top] >= RANKS[own]
    ]
    assert bad == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(CORE)))
def test_own_imports_are_relative_and_the_host_is_unknown(path: Path) -> None:
    """Inside ComfyUI the core has another name, so ``import lowmem_core`` would load a second copy."""
    foreign = {found.foreign for found in imports_of(path)}
    assert foreign & (HOST_MODULES | {"lowmem_core"}) == set()


def test_plans_know_no_torch() -> None:
    """Plans are plain integers: they can be made and tested without loading a tensor library."""
    found = {imported.foreign for path in SOURCES if part_of(path) == "plan" for imported in imports_of(path)}
    assert found & {"torch", "numpy", "diffusers", "safetensors"} == set()


def test_only_one_node_file_knows_comfy_internals() -> None:
    """Everything ComfyUI may change under us is met in ``nodes/_comfy_host.py`` alone."""
    knowing = set()
    for path in sorted((ROOT / "nodes").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [str(node.module)]
            if any(name.split(".")[0] in HOST_MODULES - {"comfy_api"} for name in names):
                knowing.add(path.name)
    assert knowing <= {"_comfy_host.py"}
