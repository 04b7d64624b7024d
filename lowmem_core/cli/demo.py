"""``lowmem demo`` and ``lowmem tiny``: the library on checkpoints that fit in a pocket."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import RequestError
from .decode import add_decode, compare_with_plain, request_of


def add_demo(commands: Any) -> None:
    """Add the commands to the parser's ``commands``."""
    demo = commands.add_parser("demo", help="build a tiny checkpoint, decode it whole and in tiles, compare the two")
    demo.add_argument("--out", type=Path, default=Path("lowmem-demo"), help="folder for the results")
    demo.set_defaults(run=_demo)
    tiny = commands.add_parser("tiny", help="write tiny checkpoints with the real key names")
    target = tiny.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", type=Path, help="folder for the files")
    target.add_argument("--comfyui", type=Path, help="a ComfyUI folder; files go where its nodes look")
    tiny.set_defaults(run=_tiny)


def _demo(options: argparse.Namespace) -> int:
    from ..pipeline import decode_to_mp4

    folder: Path = options.out
    vae, latents = _write_tiny(folder, frames=9, height=128, width=192)
    reports = []
    for name, words in (("whole", ["--tile", "off"]), ("tiles", ["--tile", "64", "--device-budget", "24MiB"])):
        out = folder / f"demo_{name}.mp4"
        files = ["--vae", str(vae), "--latents", str(latents), "--out", str(out)]
        request, host = request_of(_decode_options([*files, "--device", "cpu", *words]))
        reports.append(decode_to_mp4(request, host))
        print(f"{name} ({' '.join(words)}):\n{reports[-1].summary()}\n")
    print(_exactness(compare_with_plain(request, reports[-1]), *(report.rgb_sha256 for report in reports)))
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
    from ..tiny import write_tiny_bundle

    if options.comfyui is not None and not (options.comfyui / "models").is_dir():
        raise RequestError("this is not a ComfyUI folder", need="a models folder in it", have=str(options.comfyui))
    for path in write_tiny_bundle(options.comfyui or options.out, is_comfyui=options.comfyui is not None):
        print(path)
    return 0


def _write_tiny(folder: Path, frames: int, height: int, width: int) -> tuple[Path, Path]:
    from ..tiny import write_tiny_latents, write_tiny_wan_vae

    try:
        vae = write_tiny_wan_vae(folder, "2.1", seed=0)
        return vae, write_tiny_latents(folder, "2.1", frames=frames, height=height, width=width)
    except OSError as error:
        raise RequestError("cannot make the folder", have=str(error)) from error


def _decode_options(words: list[str]) -> argparse.Namespace:
    """Return what ``lowmem decode`` would make of ``words``."""
    parser = argparse.ArgumentParser()
    add_decode(parser.add_subparsers(required=True))
    return parser.parse_args(["decode", *words])
