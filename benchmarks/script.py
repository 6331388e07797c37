"""Options, tables and files of results that scripts share. It needs the standard library alone."""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Options that have no default, and what names a model or an artifact.
_WITHOUT_DEFAULT: dict[str, dict[str, Any]] = {
    "model": {"type": Path},
    "artifact": {"type": Path},
    "--threads": {"type": int, "help": "default: all cores"},
    "--json": {"type": Path, "help": "write the figures here"},
    "--plot": {"type": Path, "help": "draw a picture"},
}


def argument_parser(description: str | None, *names: str, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with the options `names`, and those of `defaults`, whose types follow from their defaults."""
    spec = sys.modules["__main__"].__spec__
    program = f"python -m {spec.name.removesuffix('.__main__')}" if spec else None
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(program, description=description, formatter_class=formatter)
    for name in names:
        parser.add_argument(name, **_WITHOUT_DEFAULT[name])
    for name, default in defaults.items():
        is_list = isinstance(default, list)
        kind = type(default[0] if is_list else default)
        # The class of a path depends on the system.
        kind = Path if issubclass(kind, Path) else kind
        flag, nargs = f"--{name.replace('_', '-')}", "+" if is_list else None
        parser.add_argument(flag, type=kind, nargs=nargs, default=default, help=f"default: {default}")
    return parser


def heading(*names: str) -> str:
    """Return the first two lines of a table in Markdown."""
    return f"{row(*names)}\n|{' --- |' * len(names)}"


def row(*cells: object) -> str:
    """Return a line of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"


def markdown(names: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a whole table."""
    return "\n".join([heading(*names), *(row(*cells) for cells in rows)])


def write_json(path: Path | None, content: Any) -> None:
    """Write figures to the file that `--json` names, if it does."""
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
