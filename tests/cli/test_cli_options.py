"""The options of a command are those of the dataclasses that its function takes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.main import get_command

from picompile.cli.app import report
from picompile.cli.options import takes_options
from picompile.errors import UsageError
from picompile.options import Option, option
from picompile.quantities import parse_share


@dataclass(frozen=True)
class Given:
    texts: tuple[Path | str, ...] = option((), "Texts.", metavar="FILE")
    share: float | None = option("5%", "A share.", parse=parse_share, aliases=("--part", "--portion"))
    count: int = option(3, "How many [of them]; see `picompile targets`.", least=1, most=9)
    kind: str | None = option(None, "Which.", choices=("a", "b"))
    checked: bool = option(True, "Whether.")
    python_only: int = 1


def run(*words: str) -> tuple[Given, str | None]:
    found: list[tuple[Given, str | None]] = []

    def command(given: Given, name: Annotated[str | None, Option("A name.", check=refuse_x)] = None) -> None:
        found.append((given, name))

    app = typer.Typer()
    app.command()(takes_options(command))
    with get_command(app).make_context("command", list(words)) as context:
        context.command.invoke(context)
    return found[0]


def refuse_x(name: str) -> None:
    if name == "x":
        raise UsageError("x is no name")


def test_defaults() -> None:
    assert run() == (Given(), None)


def test_values_are_parsed() -> None:
    words = ("--texts", "a", "--texts", "b", "--share", "10%", "--count", "9", "--kind", "b", "--no-checked")
    assert run(*words, "--name", "n") == (Given((Path("a"), Path("b")), 0.1, 9, "b", False), "n")
    assert run("--portion", "0.5")[0].share == run("--part", "50%")[0].share == 0.5


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--share much", "--share: 'much' is no share"),
        ("--part much", "--share: 'much' is no share"),
        ("--count 10", "--count"),
        ("--kind c", "--kind"),
        ("--name x", "x is no name"),
        ("--python-only 2", "python-only"),
    ],
)
def test_wrong_values_are_refused(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exception) as raised:  # typer's class for this differs by its version
        run(*words.split())
    assert report(raised.value, debug=False) == 2
    assert says in capsys.readouterr().err


def test_help_lists_options_and_no_aliases(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        run("--help")
    listed = capsys.readouterr().out
    assert "--share" in listed and "5%" in listed and "--no-checked" in listed and "--part" not in listed
