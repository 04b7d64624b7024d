"""The ``lowmem`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..errors import LowmemError
from .compare import add_compare
from .decode import add_decode
from .demo import add_demo
from .wan import add_wan

__all__ = ["main"]


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
    add_demo(commands)
    add_decode(commands)
    add_wan(commands)
    add_compare(commands)
    return parser
