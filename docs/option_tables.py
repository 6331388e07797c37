"""Write the option tables of docs/cli.md from the command line itself: `python docs/option_tables.py`.

A table stands between the lines `<!-- options of COMMAND -->` and `<!-- end of options -->`. tests/test_docs.py holds
that the file is what this script would write.
"""

import inspect
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from typer.models import OptionInfo

from picompile.cli.app import app

PAGE = Path(__file__).with_name("cli.md")
_TABLE = re.compile(r"(<!-- options of ([\w-]+) -->\n).*?(<!-- end of options -->)", re.DOTALL)


def option_table(command: str) -> str:
    """Return the Markdown table of the options of `command`: how each is written, its default, what it does."""
    (function,) = (found.callback for found in app.registered_commands if found.name == command)
    assert function is not None
    rows = ["| option | default | what it does |", "| --- | --- | --- |"]
    for name, kind, option, default in _options(function):
        if name != "debug":
            rows.append(f"| {_written(name, kind, option)} | {_default(kind, default)} | {_cell(option.help or '')} |")
    return "\n".join(rows) + "\n"


def _options(function: Any) -> Iterator[tuple[str, Any, OptionInfo, Any]]:
    """Yield name, type, declaration and default of each option of a command's function."""
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if get_origin(hints[name]) is Annotated:
            kind, declared = get_args(hints[name])[:2]
            if isinstance(declared, OptionInfo) and not declared.hidden:
                yield name, kind, declared, parameter.default


def _written(name: str, kind: Any, option: OptionInfo) -> str:
    """Return the spellings of an option, short ones first, and what it takes."""
    # Inside of `Annotated`, the first spelling is where the default would be.
    texts = [text for text in (option.default, *(option.param_decls or ())) if isinstance(text, str)]
    declared = [part for text in texts for part in text.split("/") if part.startswith("-")]
    names = sorted(declared or [f"--{name.replace('_', '-')}"], key=len)
    if kind is bool:
        return ", ".join(f"`{spelling}`" for spelling in names)
    value = option.metavar or "|".join(choice.value for choice in _choices(kind)) or "VALUE"
    *short, last = names
    return ", ".join([*(f"`{spelling}`" for spelling in short), f"`{last} {value}`"]).replace("|", "\\|")


def _choices(kind: Any) -> list[Enum]:
    kinds = [kind, *get_args(kind)]
    return [choice for found in kinds if isinstance(found, type) and issubclass(found, Enum) for choice in found]


def _default(kind: Any, default: Any) -> str:
    if default is inspect.Parameter.empty:
        return "required"
    return "" if kind is bool or default in (None, ()) else f"`{getattr(default, 'value', default)}`"


def _cell(text: str) -> str:
    """Return help as one line of Markdown; rich's bold marks names of commands and options."""
    text = re.sub(r"\[bold\](.*?)\[/\]", r"`\1`", " ".join(text.split()))
    return text.replace(r"\[", "[").replace("|", "\\|")


def with_tables(page: str) -> str:
    """Return the text of a page with its option tables as the command line has them now."""
    return _TABLE.sub(lambda found: f"{found[1]}{option_table(found[2])}{found[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
