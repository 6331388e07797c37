"""Write the option tables of docs/cli.md from the command line itself: `python docs/option_tables.py`.

A table stands between the lines `<!-- options of COMMAND -->` and `<!-- end of options -->`. tests/test_docs.py holds
that the file is what this script would write.
"""

import re
from pathlib import Path
from typing import Any

from typer.main import get_command

from picompile.cli.app import app
from picompile.cli.help import MORE

PAGE = Path(__file__).with_name("cli.md")
_TABLE = re.compile(r"(<!-- options of ([\w-]+) -->\n).*?(<!-- end of options -->)", re.DOTALL)


def option_table(command: str) -> str:
    """Return the Markdown table of the options of `command`: how each is written, its default, what it does."""
    found: Any = get_command(app)
    rows = ["| option | default | what it does |", "| --- | --- | --- |"]
    # Options of the short help come first.
    for option in sorted(
        found.commands[command].params, key=lambda each: getattr(each, "rich_help_panel", None) == MORE
    ):
        if option.param_type_name == "option" and not option.hidden and option.name not in ("debug", "help"):
            rows.append(f"| {_written(option)} | {_default(option)} | {_cell(option.help or '')} |")
    return "\n".join(rows) + "\n"


def _written(option: Any) -> str:
    """Return the spellings of an option, short ones first, and what it takes."""
    *others, last = sorted([*option.opts, *option.secondary_opts], key=len)
    value = "" if option.is_flag else f" {option.metavar or 'VALUE'}"
    return ", ".join(f"`{spelling}`" for spelling in (*others, last + value)).replace("|", "\\|")


def _default(option: Any) -> str:
    if option.required:
        return "required"
    return "" if option.is_flag or option.default is None else f"`{getattr(option.default, 'value', option.default)}`"


def _cell(text: str) -> str:
    """Return help as one line of Markdown; rich's bold marks names of commands and options."""
    text = re.sub(r"\[bold\](.*?)\[/\]", r"`\1`", " ".join(text.split()))
    return text.replace(r"\[", "[").replace("|", "\\|")


def with_tables(page: str) -> str:
    """Return the text of a page with its option tables as the command line has them now."""
    return _TABLE.sub(lambda found: f"{found[1]}{option_table(found[2])}{found[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
