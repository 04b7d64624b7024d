"""The core's host protocols on ComfyUI: the only file that imports ComfyUI's internals.

Written to what 0.9.2 has. Anything newer is looked up before it is used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import comfy.cli_args
import comfy.latent_formats
import comfy.model_management
import comfy.utils
import folder_paths
import torch
from PIL import Image

from ..lowmem_core.errors import RequestError
from ..lowmem_core.frames import to_uint8
from ..lowmem_core.host import Host

PREVIEW_SIZE = 512
_PIPELINES = "diffusers"


class ComfyProgress:
    """The bar and the preview on a node.

    The page keeps a node's last picture after its run and prefers it to the node's output,
    so a node that ends in a video shows that video only if it sent no pictures.

    Args:
        node_id: The node that runs, which may be inside a subgraph ("5:12").
        is_pictured: Whether the node shows pictures while it runs.
    """

    def __init__(self, node_id: str | None, is_pictured: bool = True) -> None:
        self._node_id = node_id
        self._is_pictured = is_pictured
        self._bar: Any = None
        self._phase = ""

    def update(self, done: int, total: int, phase: str) -> None:
        """Move the bar; each phase starts a new one."""
        if self._bar is None or phase != self._phase:
            self._bar = comfy.utils.ProgressBar(total, node_id=self._node_id)
            self._phase = phase
        self._bar.update_absolute(done, total)

    def preview(self, frame: torch.Tensor) -> None:
        """Show ``frame``, ``[H, W, 3]`` float RGB in 0..1 on the CPU, beside the bar."""
        if self._bar is None or not self._is_pictured:
            return
        image = Image.fromarray(to_uint8(frame).numpy())
        self._bar.update_absolute(self._bar.current, preview=("JPEG", image, PREVIEW_SIZE))


class ComfyInterrupt:
    """ComfyUI's stop button. Its exception is a BaseException on newer hosts: clean up in ``finally``."""

    def check(self) -> None:
        """Raise ComfyUI's interrupt exception if the user asked to stop."""
        comfy.model_management.throw_exception_if_processing_interrupted()


class ComfyDevices:
    """The device ComfyUI gives to VAEs, or to models, shared with the models that ComfyUI keeps there.

    Args:
        is_vae: Whether a VAE is to compute: its device differs under ``--cpu-vae``.
    """

    def __init__(self, is_vae: bool = True) -> None:
        management = comfy.model_management
        self._device = torch.device(management.vae_device() if is_vae else management.get_torch_device())

    @property
    def compute(self) -> torch.device:
        """The device that computes; the CPU under ``--cpu``."""
        return self._device

    def free_bytes(self) -> int | None:
        """Return the bytes we can have: free ones and those of models that ``make_room`` can evict."""
        device = self.compute
        if device.type == "cpu":
            return None
        free = comfy.model_management.get_free_memory(device)
        evictable = sum(
            loaded.model_loaded_memory()
            for loaded in comfy.model_management.current_loaded_models
            if loaded.device == device and not loaded.is_dead()
        )
        return int(max(0, free + evictable - comfy.model_management.extra_reserved_memory()))

    def make_room(self, nbytes: int) -> None:
        """Let ComfyUI evict its models until ``nbytes`` and its own reserve are free."""
        management = comfy.model_management
        management.free_memory(nbytes + management.extra_reserved_memory(), self.compute)
        management.soft_empty_cache()


def comfy_host(node_id: str | None, is_pictured: bool = True, is_vae: bool = True) -> Host:
    """Return the services of this ComfyUI for the node ``node_id``; see ``ComfyProgress`` and ``ComfyDevices``."""
    return Host(ComfyDevices(is_vae), ComfyProgress(node_id, is_pictured), ComfyInterrupt())


def latent_picture(channels: int) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return what turns clean Wan latents ``[1, C, F, h, w]`` into a small picture, with ComfyUI's factors."""
    formats = {16: "Wan21", 48: "Wan22"}
    latent_format = getattr(comfy.latent_formats, formats.get(channels, ""), None)
    factors = getattr(latent_format, "latent_rgb_factors", None)
    if latent_format is None or factors is None:
        return None
    bias = getattr(latent_format, "latent_rgb_factors_bias", None) or [0.0, 0.0, 0.0]

    def picture(latents: torch.Tensor) -> torch.Tensor:
        frame = latents[0, :, latents.shape[2] // 2].to("cpu", torch.float32).movedim(0, -1)
        return (frame @ torch.tensor(factors) + torch.tensor(bias) + 1) / 2

    return picture


def model_names(folder: str, extra_suffix: str = "") -> list[str]:
    """Return the files that ComfyUI finds in its folders called ``folder``, and those with ``extra_suffix``."""
    names = set(folder_paths.get_filename_list(folder))
    if extra_suffix:
        for base in map(Path, folder_paths.get_folder_paths(folder)):
            names |= {str(path.relative_to(base)) for path in base.rglob(f"*{extra_suffix}")}
    return sorted(names)


def model_path(folder: str, name: str) -> Path:
    """Return the file that ``name`` stands for, which must lie in a folder called ``folder``.

    Raises:
        RequestError: There is no such file there.
    """
    path = folder_paths.get_full_path(folder, name)
    if path is None:
        raise RequestError(
            "there is no such model file",
            need=f"a file in a models/{folder} folder",
            have=repr(name),
            remedy="Put the file there and refresh the node definitions (key R).",
        )
    return Path(path)


def file_mark(folder: str, name: str) -> tuple[int, int]:
    """Return what changes when a file is replaced."""
    status = model_path(folder, name).stat()
    return status.st_mtime_ns, status.st_size


def text_encoder_names() -> list[str]:
    """Return the text encoder files, and the folders of diffusers' pipelines that hold one."""
    folders = [f"{_PIPELINES}/{path.name}" for path in _pipelines() if (path / "text_encoder").is_dir()]
    return [*model_names("text_encoders"), *sorted(folders)]


def text_encoder_path(name: str) -> Path:
    """Return the file or the folder that ``name``, one of ``text_encoder_names``, stands for.

    Raises:
        RequestError: There is none.
    """
    found = [path for path in _pipelines() if name == f"{_PIPELINES}/{path.name}"]
    return found[0] if found else model_path("text_encoders", name)


def text_encoder_mark(name: str) -> tuple[int, int]:
    """Return what changes when the file, or something in the folder, is replaced."""
    path = text_encoder_path(name)
    files = [one for one in sorted(path.rglob("*")) if one.is_file()] if path.is_dir() else [path]
    marks = [one.stat() for one in files]
    return max((mark.st_mtime_ns for mark in marks), default=0), sum(mark.st_size for mark in marks)


def _pipelines() -> list[Path]:
    """Return the folders of diffusers' pipelines."""
    if _PIPELINES not in folder_paths.folder_names_and_paths:
        return []
    bases = [Path(base) for base in folder_paths.get_folder_paths(_PIPELINES)]
    return [path for base in bases if base.is_dir() for path in base.iterdir() if path.is_dir()]


def private_folder(name: str) -> Path:
    """Return a folder of the pack for ``name``, beside the host's own user files."""
    return Path(folder_paths.get_user_directory()) / "lowmem" / name


class SaveTarget(NamedTuple):
    """Where a file goes: its path, and how ComfyUI's pages name it."""

    path: Path
    subfolder: str


def prefix_problem(prefix: str) -> str | None:
    """Return why ``prefix`` cannot name a file below the output folder, or None if it can."""
    base = Path(os.path.abspath(folder_paths.get_output_directory()))
    target = Path(os.path.abspath(base / prefix))
    if base in target.parents:
        return None
    return f"filename_prefix {prefix!r} leaves the output folder. Use a name like 'video/lowmem'."


def save_target(prefix: str, destination: str, width: int, height: int) -> SaveTarget:
    """Return the next free mp4 name for ``prefix`` in ComfyUI's output or temp folder.

    Raises:
        RequestError: The prefix leaves that folder.
    """
    problem = prefix_problem(prefix)
    if problem is not None:
        raise RequestError(problem.rstrip("."))
    base = folder_paths.get_temp_directory() if destination == "temp" else folder_paths.get_output_directory()
    folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(prefix, base, width, height)
    return SaveTarget(Path(folder) / f"{name}_{counter:05}_.mp4", subfolder)


def workflow_metadata(prompt: Any, extra_pnginfo: Mapping[str, Any] | None) -> dict[str, str]:
    """Return what makes a dropped mp4 restore its workflow; nothing under ``--disable-metadata``."""
    if comfy.cli_args.args.disable_metadata:
        return {}
    fields = dict(extra_pnginfo or {})
    if prompt is not None:
        fields["prompt"] = prompt
    return {key: json.dumps(value) for key, value in fields.items()}
