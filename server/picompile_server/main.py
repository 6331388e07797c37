"""`picompile-serve ARTIFACT`: serve compiled models with only the runtime installed."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence

from picompile_runtime.errors import PicompileRuntimeError
from picompile_runtime.run_options import RunOption
from picompile_server.declared import SERVE_OPTIONS
from picompile_server.options import serve_options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="picompile-serve", description="Serve compiled models by OpenAI's API.")
    parser.add_argument("artifact", metavar="ARTIFACT", nargs="?", help="A compiled model's folder.")
    for option in SERVE_OPTIONS.values():
        _add(parser, option)
    return parser


def _add(parser: argparse.ArgumentParser, option: RunOption) -> None:
    """Declare one option of both command lines."""
    text = option.help.replace("%", "%%")
    if option.kind is bool:
        parser.add_argument(*option.names, action="store_true", help=text)
        return
    parser.add_argument(
        *option.names,
        action="append" if option.repeated else "store",
        type=option.kind if option.least is None else _bounded(option),
        default=option.default,
        metavar=option.metavar,
        help=text if option.default is None else f"{text} [default: {option.default}]",
    )


def _bounded(option: RunOption) -> Callable[[str], float]:
    """Return a parser of an option's number, which rejects one out of bounds."""
    least = option.least if option.least is not None else -math.inf
    most = option.most if option.most is not None else math.inf

    def read(text: str) -> float:
        try:
            number = option.kind(text)
        except ValueError:
            number = math.nan
        if not isinstance(number, int | float) or not least <= number <= most:
            raise argparse.ArgumentTypeError(f"must be a number from {least:g} to {most:g}, not {text[:80]!r}")
        return number

    return read


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
