"""The short help has the common options of a command, and `--help-all` all of them."""

import itertools
import re
from typing import Any

import pytest
from typer.main import get_command

from helpers.support import Cli
from picompile.cli.app import COMMANDS, PANELS, app, panel_of
from picompile.cli.help import MORE, MOST_SHOWN

COMPILE = {"--output", "--target", "--quant", "--context", "--sequences", "--predictor", "--work", "--overwrite"}


def options_of(command: str) -> dict[str, Any]:
    """The options of a command that are listed, by their long spellings."""
    found: Any = get_command(app)
    params = found.commands[command].params
    return {each.opts[-1]: each for each in params if each.param_type_name == "option" and not each.hidden}


def listed(text: str) -> set[str]:
    """The long spellings of the options in the first column of a help's table; that of help itself left out."""
    return set(re.findall(r"^│[ *]+(?:--temp,)?(--[\w-]+)", text, re.MULTILINE)) - {"--help"}


@pytest.mark.parametrize("command", COMMANDS)
def test_short_help_has_what_is_common(command: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    options = options_of(command)
    common = {name for name, option in options.items() if option.rich_help_panel != MORE}
    ended = cli(command, "--help")
    assert (ended.code, listed(ended.out)) == (0, common)
    assert len(common) <= MOST_SHOWN
    last = ended.out.rstrip().splitlines()[-1]
    more = len(options) - len(common)
    assert bool(more) == (len(options) > MOST_SHOWN)
    assert (f"picompile {command} --help-all shows {more} more options." in last) == bool(more)


@pytest.mark.parametrize("command", [name for name in COMMANDS if len(options_of(name)) > MOST_SHOWN])
def test_help_all_has_every_option(command: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    ended = cli(command, "--help-all")
    assert (ended.code, ended.err, listed(ended.out)) == (0, "", set(options_of(command)))
    assert MORE in ended.out and "more options." not in ended.out


def test_a_long_text_is_short_without_help_all(cli: Cli) -> None:
    """Nobody who asks what options there are reads nineteen lines on one; `--help-all` has them."""
    for command in ("compile", "plan"):
        texts = (cli(command, ask).out for ask in ("--help", "--help-all"))
        short, whole = (" ".join(re.sub("[│╭╰─]", " ", text).split()) for text in texts)
        assert "Weight format, such as 4bit, q8 or f16. Default: 4bit, or stored if MODEL is quantized." in short
        assert "mxfp4" not in short and "mxfp4 (4-bit floats" in whole and "Weight format, such as" not in whole
        assert "mxfp4" in options_of(command)["--quant"].help


def test_plan_shows_what_a_buyer_needs() -> None:
    shown = {name for name, option in options_of("plan").items() if option.rich_help_panel != MORE}
    assert shown >= {
        "--target",
        "--vram-budget",
        "--host-memory",
        "--host-bandwidth",
        "--shape",
        "--firing",
        "--prompt",
    }


def test_compile_shows_eight_options() -> None:
    assert {name for name, option in options_of("compile").items() if option.rich_help_panel is None} == COMPILE


def test_commands_are_in_panels(cli: Cli) -> None:
    assert [name for names in PANELS.values() for name in names if name not in COMMANDS] == []
    text = cli("--help").out
    places = [text.index(f"─ {panel} ─") for panel in PANELS]
    assert places == sorted(places)
    assert panel_of("run") == panel_of("a command of tomorrow") == "Use a model"


def test_paragraphs_are_wrapped_for_the_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not where the source has the ends of its lines; examples stay as they are written."""
    monkeypatch.setenv("COLUMNS", "60")
    for command in ("list", "serve"):
        text = cli(command, "--help").out.split("Usage:")[1].split("Examples:")
        lines = [line.strip() for line in text[0].splitlines()[1:]]
        words = " ".join(lines).split()
        for line, after in itertools.pairwise(lines):
            assert not line or not after or len(f" {line} {after.split()[0]}") > 58, line
        assert len(words) > 20 and f"\n   picompile {command}" in text[1]
