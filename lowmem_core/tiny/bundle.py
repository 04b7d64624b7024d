"""All tiny files of the Wan family at once, where a ComfyUI looks for them or in one folder."""

from __future__ import annotations

from pathlib import Path

from ..errors import RequestError
from .latents import write_tiny_latents
from .umt5 import write_tiny_umt5
from .wan_lora import write_tiny_wan_lora
from .wan_transformer import write_tiny_wan
from .wan_vae import write_tiny_wan_vae

_FOLDERS = ("vae", "diffusion_models", "text_encoders", "loras")
_LORAS = {"wan2.2_t2v_high_noise_lora_tiny": ("lora_A", 6), "wan2.2_t2v_low_noise_lora_tiny": ("lora_down", 7)}
_TRANSFORMERS = {
    "wan2.1_t2v_tiny": ("t2v", 0),
    "wan2.2_t2v_high_noise_tiny": ("t2v", 1),
    "wan2.2_t2v_low_noise_tiny": ("t2v", 2),
    "wan2.2_i2v_high_noise_tiny": ("i2v", 3),
    "wan2.2_i2v_low_noise_tiny": ("i2v", 4),
    "wan2.2_ti2v_tiny": ("ti2v", 5),
}


def write_tiny_bundle(root: Path | str, *, is_comfyui: bool = False) -> list[Path]:
    """Write tiny VAEs, transformers, a text encoder, LoRAs, latents and a picture.

    Args:
        root: A ComfyUI folder, or a folder for everything; made if needed.
        is_comfyui: Whether files go where ComfyUI's nodes look.

    Returns:
        The files.

    Raises:
        RequestError: The folder cannot be written to.
    """
    root = Path(root)
    try:
        vaes, models, texts, loras = (_folder(root, f"models/{name}" if is_comfyui else "") for name in _FOLDERS)
        inputs = _folder(root, "input" if is_comfyui else "")
        written = [write_tiny_wan_vae(vaes, "2.1", seed=0), write_tiny_wan_vae(vaes, "2.2", seed=0)]
        written.append(write_tiny_latents(inputs, "2.1", frames=5, height=96, width=128))
        for name, (kind, seed) in _TRANSFORMERS.items():
            written.append(write_tiny_wan(models, kind, seed=seed, name=f"{name}.safetensors"))
        written += [write_tiny_umt5(texts), _write_picture(inputs / "lowmem_tiny.png")]
        for name, (naming, seed) in _LORAS.items():
            made = write_tiny_wan_lora(loras, "t2v", naming, seed=seed)
            written.append(made.replace(loras / f"{name}.safetensors"))
    except OSError as error:
        raise RequestError(
            "cannot write the tiny files", need="a folder that can be written to", have=str(error)
        ) from error
    return written


def _write_picture(path: Path) -> Path:
    """Write a picture of two slopes, for models that take a first frame."""
    import torch
    from PIL import Image

    down, across = torch.meshgrid(torch.linspace(0, 255, 96), torch.linspace(0, 255, 128), indexing="ij")
    pixels = torch.stack([down, across, 255 - down], dim=-1).to(torch.uint8)
    Image.fromarray(pixels.numpy()).save(path)
    return path


def _folder(root: Path, name: str) -> Path:
    """Return a folder that exists."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder
