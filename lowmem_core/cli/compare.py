"""``lowmem compare wan``: one request in every memory mode, and whether the latents are the same."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import BudgetError
from ..plan.denoise_plan import MEMORY_MODES, RESIDENT
from ..units import format_bytes
from ._host import device_of, shell_host
from .wan import add_wan_options, wan_request_of

if TYPE_CHECKING:
    from ..host import Host
    from ..pipeline import WanRequest


def add_compare(commands: Any) -> None:
    """Add the command to the parser's ``commands``."""
    compare = commands.add_parser("compare", help="run one request in every memory mode and compare")
    families = compare.add_subparsers(required=True)
    wan = families.add_parser("wan", help="a Wan denoise")
    add_wan_options(wan)
    wan.add_argument("--json", action="store_true", help="print one JSON array")
    wan.set_defaults(run=_compare)


def _compare(options: argparse.Namespace) -> int:
    options.memory_mode, options.resume, options.no_save = RESIDENT, "never", True
    host = shell_host(device_of(options.device))
    request, _ = wan_request_of(options, host)
    rows: list[dict[str, Any]] = []
    for mode in MEMORY_MODES:
        rows.append(_row(replace(request, memory_mode=mode, saving=None), host))
        known = [row["latents_sha256"] for row in rows if row["latents_sha256"]]
        rows[-1]["identical"] = rows[-1]["latents_sha256"] == known[0] if rows[-1]["latents_sha256"] else None
    print(json.dumps(rows) if options.json else _table(rows))
    return 0 if all(row["identical"] is not False for row in rows) else 1


def _row(request: WanRequest, host: Host) -> dict[str, Any]:
    """Return what a run in one mode did, or why it did not run."""
    from ..pipeline import denoise_wan

    try:
        facts = denoise_wan(request, host).to_dict()
    except BudgetError as error:
        return {"memory_mode": request.memory_mode, "latents_sha256": None, "refused": str(error)}
    return facts


def _table(rows: list[dict[str, Any]]) -> str:
    """Return aligned text."""
    lines = [f"{'mode':<9} {'peak':>11} {'measured by':>13} {'seconds':>8}  {'SHA-256 of the latents':<22}  identical"]
    for row in rows:
        if row["latents_sha256"] is None:
            lines.append(f"{row['memory_mode']:<9} {row['refused']}")
            continue
        peak = "-" if row["measured_peak_bytes"] is None else format_bytes(row["measured_peak_bytes"])
        lines.append(
            f"{row['memory_mode']:<9} {peak:>11} {row['measured_by'] or '-':>13} {row['denoise_s']:>8.2f}  "
            f"{row['latents_sha256'][:22]}  {'yes' if row['identical'] else 'NO'}"
        )
    return "\n".join(lines)
