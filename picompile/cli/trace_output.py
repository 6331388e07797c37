"""A trace's file as an output: what it may overwrite, and how it is written."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from picompile.cli.checks import require_output_file
from picompile.cli.pages import write_text
from picompile.errors import UsageError

if TYPE_CHECKING:
    from picompile_runtime.trace import Step

_START = b'{"traceEvents":'


def require_trace_output(path: Path) -> None:
    """Raises `UsageError` where `path` cannot become a trace: only a trace is ever overwritten."""
    require_output_file(path, "--trace", _require_trace, overwrite=True)


def _require_trace(path: Path) -> None:
    with path.open("rb") as file:
        is_trace = file.read(len(_START)) == _START
    if not is_trace:
        raise UsageError(f"{path}: exists and is no trace of bench, so it is not overwritten; choose another file")


def write_trace(path: Path, steps: "Sequence[Step]") -> None:
    """Writes the steps as a trace, whole or not at all."""
    from picompile_runtime.trace import chrome_trace

    text = json.dumps(chrome_trace(steps), separators=(",", ":")) + "\n"
    write_text(path, text, lambda: require_trace_output(path), overwrite=True)
