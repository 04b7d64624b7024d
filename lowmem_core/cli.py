"""The ``lowmem`` command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import LowmemError, RequestError
from .host import Host, PlainDevices
from .memory import MemoryBudget
from .units import parse_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .pipeline import DecodeReport, DecodeRequest

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 1 after an error that was explained on stderr."""
    options = _parser().parse_args(arguments)
    try:
        result: int = options.run(options)
    except LowmemError as error:
        print(f"lowmem: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lowmem: stopped", file=sys.stderr)
        return 130
    return result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lowmem", description="Diffusion under a byte budget, with the same pixels.")
    commands = parser.add_subparsers(required=True)
    demo = commands.add_parser("demo", help="build a tiny checkpoint, decode it whole and in tiles, compare the two")
    demo.add_argument("--out", type=Path, default=Path("lowmem-demo"), help="folder for the results")
    demo.set_defaults(run=_demo)
    tiny = commands.add_parser("tiny", help="write tiny checkpoints with the real key names")
    target = tiny.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", type=Path, help="folder for the files")
    target.add_argument("--comfyui", type=Path, help="a ComfyUI folder; files go where its nodes look")
    tiny.set_defaults(run=_tiny)
    decode = commands.add_parser("decode", help="decode Wan latents straight into an MP4")
    _add_decode_options(decode)
    decode.set_defaults(run=_decode)
    return parser


def _add_decode_options(decode: argparse.ArgumentParser) -> None:
    decode.add_argument("--vae", type=Path, required=True, help="Wan VAE: safetensors, .pth or a diffusers folder")
    decode.add_argument("--latents", type=Path, required=True, help="ComfyUI .latent or safetensors")
    decode.add_argument("--out", type=Path, required=True, help="the MP4 to write")
    decode.add_argument("--fps", default="16", help="frames per second, 23.976 and 30000/1001 included")
    decode.add_argument("--dtype", choices=_DTYPES, help="default: fp32 on a processor, bf16 on a GPU")
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


def _demo(options: argparse.Namespace) -> int:
    from .pipeline import decode_to_mp4

    folder: Path = options.out
    vae, latents = _write_tiny(folder, folder, frames=9, height=128, width=192)
    reports = []
    for name, words in (("whole", ["--tile", "off"]), ("tiles", ["--tile", "64", "--device-budget", "24MiB"])):
        out = folder / f"demo_{name}.mp4"
        files = ["--vae", str(vae), "--latents", str(latents), "--out", str(out)]
        request, host = _request(_parser().parse_args(["decode", *files, "--device", "cpu", *words]))
        reports.append(decode_to_mp4(request, host))
        print(f"{name} ({' '.join(words)}):\n{reports[-1].summary()}\n")
    print(_exactness(_compare(request, reports[-1]), *(report.rgb_sha256 for report in reports)))
    print(f"The video lies in {reports[-1].path}.")
    return 0


def _exactness(facts: dict[str, Any], *digests: str) -> str:
    """Say how far the tiles are from the plain decode."""
    same = "the same" if len(set(digests)) == 1 else "not the same"
    return (
        f"Tiles against the plain decode of the whole clip: largest difference {facts['max_abs_diff']:.1e} of 2, "
        f"{facts['uint8_mismatch_fraction']:.1e} of the 8-bit values differ.\n"
        f"SHA-256 of the frames, whole and tiles: {same} ({', '.join(digest[:12] for digest in digests)})."
    )


def _tiny(options: argparse.Namespace) -> int:
    if options.comfyui is not None:
        if not (options.comfyui / "models").is_dir():
            raise RequestError("this is not a ComfyUI folder", need="a models folder in it", have=str(options.comfyui))
        written = _write_tiny(options.comfyui / "models" / "vae", options.comfyui / "input")
    else:
        written = _write_tiny(options.out, options.out)
    for path in written:
        print(path)
    return 0


def _write_tiny(
    models: Path, latents: Path, *, frames: int = 5, height: int = 96, width: int = 128
) -> tuple[Path, Path]:
    from .tiny import write_tiny_latents, write_tiny_wan_vae

    try:
        models.mkdir(parents=True, exist_ok=True)
        latents.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError("cannot make the folder", have=str(error)) from error
    write_tiny_wan_vae(models, "2.2", seed=0)
    vae = write_tiny_wan_vae(models, "2.1", seed=0)
    return vae, write_tiny_latents(latents, "2.1", frames=frames, height=height, width=width)


def _request(options: argparse.Namespace) -> tuple[DecodeRequest, Host]:
    import torch

    from .load.latents import read_latents
    from .pipeline import DecodeRequest
    from .vae import load_wan_vae
    from .write import VideoSettings, parse_fps

    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = options.dtype or ("fp32" if device.type == "cpu" else "bf16")
    dtype: torch.dtype = getattr(torch, _DTYPES[name])
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
    return request, Host(PlainDevices(device), progress=_Bar(sys.stderr.isatty()))


def _decode(options: argparse.Namespace) -> int:
    from .pipeline import decode_to_mp4

    request, host = _request(options)
    report = decode_to_mp4(request, host)
    facts = report.to_dict()
    if options.compare:
        facts |= _compare(request, report)
    if options.json:
        print(json.dumps(facts))
        return 0
    print(report.summary())
    if options.compare:
        for name in ("equal_to_reference", "max_abs_diff", "uint8_mismatch_fraction"):
            print(f"{name} {facts[name]}")
    print(f"The video lies in {report.path}.")
    return 0


def _compare(request: DecodeRequest, report: DecodeReport) -> dict[str, Any]:
    """Decode the plain way, the whole clip at once, and say how far our frames are from it."""
    import torch

    from .decode import DecodeServices, decode_samples
    from .frames import to_uint8

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


class _Bar:
    """A progress bar on stderr."""

    def __init__(self, is_shown: bool) -> None:
        self._is_shown = is_shown

    def update(self, done: int, total: int, phase: str) -> None:
        """Redraw the bar."""
        if not self._is_shown:
            return
        filled = 30 * done // max(1, total)
        end = "\n" if done == total else ""
        print(f"\r{phase} [{'#' * filled}{'.' * (30 - filled)}] {done}/{total}", end=end, file=sys.stderr, flush=True)

    def preview(self, frame: torch.Tensor) -> None:
        """Ignore the frame."""
