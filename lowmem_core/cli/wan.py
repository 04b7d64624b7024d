"""``lowmem wan``: text, and an image, to a video, and ``lowmem runs``: unfinished ones."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from ..host import Host
from ..memory import MemoryBudget
from ..plan.denoise_plan import MEMORY_MODES, RESIDENT
from ..shapes import VideoShape
from ..units import format_bytes, parse_bytes
from ._host import DTYPES, device_of, dtype_of, shell_host

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..denoise import LoraUse, RunStore
    from ..families.wan.images import ImageConditions
    from ..families.wan.models import WanFiles
    from ..families.wan.sampling import Conditioning
    from ..pipeline import WanRequest
    from ..text import Embeds

_RUNS = "LOWMEM_RUNS"


def add_wan(commands: Any) -> None:
    """Add the commands to the parser's ``commands``."""
    wan = commands.add_parser("wan", help="make a video with a Wan 2.x model")
    add_wan_options(wan)
    wan.add_argument("--memory-mode", choices=MEMORY_MODES, default=RESIDENT)
    wan.add_argument("--resume", choices=("auto", "never"), default="auto", help="go on with an unfinished run")
    wan.add_argument("--no-save", action="store_true", help="do not save the run, so that it cannot go on later")
    wan.add_argument("--out", type=Path, required=True, help="the MP4 to write")
    wan.add_argument("--latents-out", type=Path, help="keep the latents as .latent or .safetensors")
    wan.add_argument("--json", action="store_true", help="print one JSON object")
    wan.set_defaults(run=_wan)
    runs = commands.add_parser("runs", help="list or remove unfinished runs")
    runs.add_argument("--runs-folder", type=Path, help=f"default: {_RUNS}, or lowmem/runs in the user's cache folder")
    runs.add_argument("--remove", metavar="NAME", help="a name of the list, or all")
    runs.set_defaults(run=_runs)


def add_wan_options(wan: argparse.ArgumentParser) -> None:
    """Add what both ``wan`` and ``compare wan`` take."""
    wan.add_argument("--model", type=Path, required=True, help="the transformer, or the high-noise one of two")
    wan.add_argument("--low", type=Path, help="the low-noise transformer")
    wan.add_argument("--vae", type=Path, required=True, help="Wan VAE: safetensors, .pth or a diffusers folder")
    wan.add_argument("--prompt", help="what to show")
    wan.add_argument("--negative", default="", help="what not to show")
    wan.add_argument("--text-encoder", type=Path, help="UMT5: a file from models/text_encoders, or a diffusers folder")
    wan.add_argument("--tokenizer", type=Path, help="a tokenizer folder, for text encoders that hold none")
    wan.add_argument("--no-embeds-cache", action="store_true", help="keep no embeds of prompts on disk")
    wan.add_argument("--embeds", type=Path, help="safetensors with prompt_embeds and negative_prompt_embeds")
    wan.add_argument("--image", type=Path, help="the first frame")
    wan.add_argument("--last-image", type=Path, help="the last frame, for models that take one")
    wan.add_argument("--size", required=True, metavar="WxH")
    wan.add_argument("--frames", type=int, default=81, help="1 + 4 k; 1 makes an image")
    wan.add_argument("--fps", default="16")
    wan.add_argument("--steps", type=int, default=30)
    wan.add_argument("--sampler", choices=("unipc", "euler"), default="unipc")
    wan.add_argument("--guidance", type=float, default=5.0, help="1 turns it off")
    wan.add_argument("--guidance-low", type=float, help="for the low-noise transformer")
    wan.add_argument("--boundary", type=float, help="where the low-noise transformer takes over")
    wan.add_argument("--shift", type=float, default=5.0)
    wan.add_argument("--dtype", choices=DTYPES, help="default: fp32 on a processor, bf16 on a GPU")
    wan.add_argument("--seed", type=int, default=0)
    wan.add_argument("--device", help="default: cuda if there is one, else cpu")
    wan.add_argument("--device-budget", metavar="BYTES", help='such as "6GiB"')
    wan.add_argument("--host-budget", metavar="BYTES", help='weights beyond it stay on disk; such as "16GiB"')
    wan.add_argument("--lora", action="append", default=[], metavar="FILE[:STRENGTH]", help="on the first transformer")
    wan.add_argument("--lora-low", action="append", default=[], metavar="FILE[:STRENGTH]", help="on the low-noise one")
    wan.add_argument("--runs-folder", type=Path, help=f"default: {_RUNS}, or lowmem/runs in the user's cache folder")


def _wan(options: argparse.Namespace) -> int:
    from ..denoise import save_latents
    from ..pipeline import denoise_wan

    started = time.perf_counter()
    host = shell_host(device_of(options.device))
    request, vae = wan_request_of(options, host)
    report = denoise_wan(request, host)
    if options.latents_out is not None:
        save_latents(options.latents_out, report.latents)
    video = _decode(options, host, report.latents, vae)
    if report.saved is not None:
        report.saved.finish()
    facts = video.to_dict() | report.to_dict() | {"total_s": round(time.perf_counter() - started, 3)}
    peaks = [phase.measured_peak_bytes for phase in (report.memory, video.memory)]
    facts["planned_peak_bytes"] = max(report.memory.planned_peak_bytes, video.memory.planned_peak_bytes)
    facts["measured_peak_bytes"] = None if None in peaks else max(peak for peak in peaks if peak is not None)
    if options.json:
        print(json.dumps(facts))
        return 0
    print(report.summary())
    print(video.summary())
    print(f"The video lies in {video.path}.")
    return 0


def wan_request_of(options: argparse.Namespace, host: Host) -> tuple[WanRequest, nn.Module]:
    """Return what the options ask for, and the VAE."""
    from ..denoise import SamplerSettings
    from ..families.wan.conditioning import latent_shape
    from ..families.wan.sampling import Guidance
    from ..pipeline import RunSaving, WanRequest
    from ..vae import load_wan_vae

    dtype = dtype_of(options.dtype, host.devices.compute)
    vae: Any = load_wan_vae(options.vae, dtype)
    shape = latent_shape(_video(options), int(vae.config.scale_factor_spatial), int(vae.config.z_dim))
    budget = MemoryBudget(device_bytes=_bytes(options.device_budget), host_bytes=_bytes(options.host_budget))
    files = _files(options, dtype)
    request = WanRequest(
        files=files,
        shape=shape,
        conditioning=_conditioning(options, host, budget, _images(options, host, budget, vae)),
        sampler=SamplerSettings(options.sampler, options.steps, options.shift),
        guidance=Guidance(options.guidance, options.guidance_low),
        seed=options.seed,
        memory_mode=options.memory_mode,
        budget=budget,
        saving=None if options.no_save else RunSaving(run_store(options.runs_folder), resume=options.resume),
    )
    return request, vae


def _video(options: argparse.Namespace) -> VideoShape:
    width, cross, height = options.size.lower().partition("x")
    if not (cross and width.isdigit() and height.isdigit()):
        raise RequestError("cannot read the size", need="WIDTHxHEIGHT, such as 832x480", have=repr(options.size))
    return VideoShape(options.frames, int(height), int(width))


def _bytes(text: str | None) -> int | None:
    return None if text is None else parse_bytes(text)


def _files(options: argparse.Namespace, dtype: Any) -> WanFiles:
    from ..families.wan.models import WanFiles

    loras = [_lora(text, 0) for text in options.lora] + [_lora(text, 1) for text in options.lora_low]
    return WanFiles(options.model, options.low, dtype, tuple(loras), options.boundary)


def _lora(text: str, model: int) -> LoraUse:
    """Return the LoRA of ``FILE`` or ``FILE:STRENGTH``."""
    from ..denoise import LoraUse

    name, colon, strength = text.rpartition(":")
    try:
        return LoraUse(Path(name), float(strength), model) if colon else LoraUse(Path(text), 1.0, model)
    except ValueError:
        return LoraUse(Path(text), 1.0, model)


def _images(options: argparse.Namespace, host: Host, budget: MemoryBudget, vae: Any) -> ImageConditions:
    """Return what the images give, encoded."""
    from ..families.wan.conditioning import latent_shape
    from ..families.wan.images import EncodePlace, ImageConditions, condition_on_images, fitted

    if options.image is None:
        if options.last_image is not None:
            raise RequestError("a last frame needs a first one", need="--image", have="--last-image")
        return ImageConditions()
    video = _video(options)
    shape = latent_shape(video, int(vae.config.scale_factor_spatial), int(vae.config.z_dim))
    pictures = [
        None if path is None else fitted(_picture(path), video.height, video.width)
        for path in (options.image, options.last_image)
    ]
    assert pictures[0] is not None
    place = EncodePlace(host.devices.compute, budget.device_bytes or host.devices.free_bytes(), host.interrupt.check)
    return condition_on_images(vae, shape, pictures[0], pictures[1], place)


def _picture(path: Path) -> Tensor:
    """Return the picture in a file: ``[H, W, 3]`` in 0..1."""
    import numpy
    import torch
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError) as error:
        raise RequestError("cannot read the picture", need="a PNG, JPEG or WebP file", have=str(error)) from error
    return torch.from_numpy(numpy.array(upright)).float() / 255


def _conditioning(
    options: argparse.Namespace, host: Host, budget: MemoryBudget, images: ImageConditions
) -> Conditioning:
    from ..families.wan.sampling import Conditioning

    embeds = _embeds(options, host, budget)
    return Conditioning(
        embeds.prompt_embeds,
        embeds.negative_prompt_embeds,
        embeds.image_embeds,
        images.image_condition,
        images.kept_frame,
        per_token_timesteps=images.kept_frame is not None,
    )


def _embeds(options: argparse.Namespace, host: Host, budget: MemoryBudget) -> Embeds:
    """Return the embeddings of the prompts, from a file or made here."""
    from ..text import DEFAULT_LIMIT_BYTES, Embeds, EmbedsCache, EncodeOptions, embed_prompts, read_embeds

    ways = [options.embeds is not None, options.prompt is not None]
    if ways == [True, False]:
        return read_embeds(options.embeds)
    if ways != [False, True] or options.text_encoder is None:
        given = [name for name in ("embeds", "prompt", "text_encoder") if getattr(options, name) is not None]
        raise RequestError(
            "there must be one prompt",
            need="--prompt TEXT with --text-encoder FILE, or --embeds FILE",
            have=", ".join(f"--{name.replace('_', '-')}" for name in given) or "neither",
        )
    compute = host.devices.compute
    has_guidance = max(options.guidance, options.guidance_low or 0) > 1
    embeds = embed_prompts(
        [options.prompt, options.negative] if has_guidance else [options.prompt],
        options.text_encoder,
        compute,
        tokenizer=options.tokenizer,
        dtype=dtype_of(options.dtype, compute),
        options=EncodeOptions(limit_bytes=budget.device_bytes or DEFAULT_LIMIT_BYTES, poll=host.interrupt.check),
        cache=None if options.no_embeds_cache else EmbedsCache(_cache_folder() / "embeds"),
    )
    return Embeds(embeds[0], embeds[1] if has_guidance else None)


def _decode(options: argparse.Namespace, host: Host, latents: Tensor, vae: nn.Module) -> Any:
    """Write the video; the run is still saved if that fails."""
    from ..pipeline import DecodeRequest, decode_to_mp4
    from ..write import VideoSettings, parse_fps

    budget = MemoryBudget(device_bytes=_bytes(options.device_budget))
    settings = VideoSettings(fps=parse_fps(options.fps))
    return decode_to_mp4(DecodeRequest(latents, vae, options.out, settings, budget=budget), host)


def run_store(folder: Path | None) -> RunStore:
    """Return the folder of unfinished runs: as asked, from the environment, or in the user's cache folder."""
    from ..denoise import RunStore

    if folder is None:
        folder = Path(os.environ[_RUNS]) if os.environ.get(_RUNS) else _cache_folder() / "runs"
    return RunStore(folder)


def _cache_folder() -> Path:
    """Return our folder among the user's caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowmem"


def _runs(options: argparse.Namespace) -> int:
    store = run_store(options.runs_folder)
    runs = store.list_runs()
    if options.remove is not None:
        names = [run.name for run in runs] if options.remove == "all" else [options.remove]
        for name in names:
            if not store.remove(name):
                raise RequestError("there is no saved run of this name", need="a name from the list", have=repr(name))
            print(f"removed {name}")
        return 0
    for run in runs:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created))
        print(f"{run.name}  step {run.step} of {run.steps}  {when}  {format_bytes(run.nbytes)}  {run.what}")
    if not runs:
        print(f"no unfinished runs in {store.folder}")
    return 0
