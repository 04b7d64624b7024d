"""``lowmem decode``: latents to an MP4."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..host import Host
from ..memory import MemoryBudget
from ..units import parse_bytes
from ._host import DTYPES, device_of, dtype_of, shell_host

if TYPE_CHECKING:
    from torch import Tensor

    from ..pipeline import DecodeReport, DecodeRequest


def add_decode(commands: Any) -> None:
    """Add the command to the parser's ``commands``."""
    decode = commands.add_parser("decode", help="decode Wan latents straight into an MP4")
    _add_options(decode)
    decode.set_defaults(run=_decode)


def _add_options(decode: argparse.ArgumentParser) -> None:
    decode.add_argument("--vae", type=Path, required=True, help="Wan VAE: safetensors, .pth or a diffusers folder")
    decode.add_argument("--latents", type=Path, required=True, help="ComfyUI .latent or safetensors")
    decode.add_argument("--out", type=Path, required=True, help="the MP4 to write")
    decode.add_argument("--fps", default="16", help="frames per second, 23.976 and 30000/1001 included")
    decode.add_argument("--dtype", choices=DTYPES, help="default: fp32 on a processor, bf16 on a GPU")
    decode.add_argument("--device", help="default: cuda if there is one, else cpu")
    decode.add_argument("--device-budget", metavar="BYTES", help='such as "1.2GiB"')
    decode.add_argument("--tile", default="auto", help="auto, off, blended, or the side of an exact tile in pixels")
    decode.add_argument("--codec", default="h264", help="h264, hevc or av1")
    decode.add_argument("--crf", type=int, default=18, help="quality, lower is better")
    decode.add_argument("--bit-depth", type=int, default=8, choices=(8, 10))
    decode.add_argument(
        "--discard-partial", action="store_true", help="keep no playable part when the video cannot be finished"
    )
    decode.add_argument("--compare", action="store_true", help="also decode the plain way and compare")
    decode.add_argument("--json", action="store_true", help="print one JSON object")


def request_of(options: argparse.Namespace) -> tuple[DecodeRequest, Host]:
    """Return what the options of the command ask for."""
    from ..load.latents import read_latents
    from ..pipeline import DecodeRequest
    from ..vae import load_wan_vae
    from ..write import VideoSettings, parse_fps

    device = device_of(options.device)
    dtype = dtype_of(options.dtype, device)
    budget = parse_bytes(options.device_budget) if options.device_budget else None
    settings = VideoSettings(
        fps=parse_fps(options.fps),
        codec=options.codec,
        crf=options.crf,
        bit_depth=options.bit_depth,
        keep_partial=not options.discard_partial,
    )
    request = DecodeRequest(
        latents=read_latents(options.latents),
        vae=load_wan_vae(options.vae, dtype),
        path=options.out,
        video=settings,
        tiling=int(options.tile) if options.tile.isdigit() else options.tile,
        budget=MemoryBudget(device_bytes=budget),
    )
    return request, shell_host(device)


def _decode(options: argparse.Namespace) -> int:
    from ..pipeline import decode_to_mp4

    request, host = request_of(options)
    report = decode_to_mp4(request, host)
    facts = report.to_dict()
    if options.compare:
        facts |= compare_with_plain(request, report)
    if options.json:
        print(json.dumps(facts))
        return 0
    print(report.summary())
    if options.compare:
        for name in ("equal_to_reference", "max_abs_diff", "uint8_mismatch_fraction"):
            print(f"{name} {facts[name]}")
    print(f"The video lies in {report.path}.")
    return 0


def compare_with_plain(request: DecodeRequest, report: DecodeReport) -> dict[str, Any]:
    """Decode the plain way, the whole clip at once, and say how far our frames are from it."""
    import torch

    from ..decode import DecodeServices, decode_samples
    from ..frames import to_uint8

    dtype = next(request.vae.parameters()).dtype
    latents = request.latents if request.latents.ndim == 5 else request.latents.unsqueeze(2)
    reference = _plain_decode(request.vae, latents.to(dtype))
    start, worst, different = 0, 0.0, 0
    for sample in decode_samples(request.latents, request.vae, report.plan, DecodeServices()):
        plain = reference[:, :, start : start + sample.shape[2]]
        start += sample.shape[2]
        worst = max(worst, float((sample.float() - plain.float()).abs().max()))
        levels = [to_uint8(x.float().add(1.0).mul(0.5)) for x in (sample, plain)]
        different += int(torch.count_nonzero(levels[0] != levels[1]))
    return {
        "equal_to_reference": worst == 0.0,
        "max_abs_diff": worst,
        "uint8_mismatch_fraction": different / reference.numel(),
    }


def _plain_decode(vae: Any, latents: Tensor) -> Tensor:
    import torch

    with torch.inference_mode():
        return vae.decode(latents).sample  # type: ignore[no-any-return]
