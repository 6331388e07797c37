"""`picompile-serve ARTIFACT`: serve compiled models with only the runtime installed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from picompile_runtime.errors import PicompileRuntimeError
from picompile_server.declared import SERVE_OPTIONS
from picompile_server.options import serve_options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="picompile-serve", description="Serve compiled models by OpenAI's API.")
    parser.add_argument("artifact", metavar="ARTIFACT", nargs="?", help="A compiled model's folder.")
    for option in SERVE_OPTIONS.values():
        option.add_to(parser, bounded=True)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal ends it, and return the exit code, which is the error's, if any."""
    options = vars(_parser().parse_args(arguments))
    try:
        from picompile_server.http.server import serve

        serve(serve_options(options["artifact"], options))
    except PicompileRuntimeError as error:
        if options["debug"]:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0
