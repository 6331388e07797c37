"""The help of a command: a short one with the options that most people need, and all options with `--help-all`.

An option's declaration says whether it is common (`Option.common`). The others of a command with many options are
in the panel `MORE`, and only `--help-all` shows that panel. What the short help says of an option may be shorter, too
(`Option.short`).
"""

from collections.abc import Callable, Mapping
from copy import copy
from inspect import Parameter
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

MORE = "More options"
# Commands with at most so many options show all of them.
MOST_SHOWN = 12
_SHOWS_ALL = "picompile.help_all"
_SHORT_TEXTS = "picompile_short_texts"


class ShortHelpCommand(TyperCommand):
    """A command whose `--help` leaves out the options of the panel `MORE`, and says how many they are.

    The options that it shows have their short texts, if there is a `--help-all` with the whole ones.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, without the panel `MORE` unless `--help-all` asks for it."""
        shown = copy(self)
        shown.help = _unwrapped(self.help or "")
        if not ctx.meta.get(_SHOWS_ALL):
            shown.params = [
                self._shortened(each) for each in self.params if getattr(each, "rich_help_panel", None) != MORE
            ]
            names = {each.name for each in shown.params}
            if left := sum(not each.hidden for each in self.params if each.name not in names):  # type: ignore[attr-defined]
                shown.epilog = f"[bold]{ctx.command_path} --help-all[/] shows {left} more options."
        super(ShortHelpCommand, shown).format_help(ctx, formatter)

    def _shortened(self, parameter: Any) -> Any:
        """Return a parameter with its short text, if it has one and `--help-all` shows the whole one."""
        text = getattr(self.callback, _SHORT_TEXTS, {}).get(parameter.name)
        if text is None or HELP_ALL.name not in {each.name for each in self.params}:
            return parameter
        shown = copy(parameter)
        shown.help = text
        return shown


def _unwrapped(text: str) -> str:
    """Return a help without the ends of lines inside paragraphs: the terminal's width is another than the source's.

    Paragraphs that begin with click's mark for it, as examples do, stay as they are.
    """
    paragraphs = text.split("\n\n")
    return "\n\n".join(each if each.lstrip().startswith("\b") else " ".join(each.split()) for each in paragraphs)


def set_short_texts(command: Callable[..., None], texts: Mapping[str, str]) -> None:
    """Keep the short texts of a command's options, by the names of their parameters, for `ShortHelpCommand`."""
    setattr(command, _SHORT_TEXTS, texts)


def with_short_help(parameters: list[Parameter]) -> list[Parameter]:
    """Return the parameters of a command, with `--help-all` if it has so many options that some are left out."""
    options = [each for each in map(_option, parameters) if each is not None and not each.hidden]
    if len(options) > MOST_SHOWN:
        return [*parameters, HELP_ALL]
    return [_shown(each) for each in parameters]


def _option(parameter: Parameter) -> OptionInfo | None:
    """Return typer's record of the option that a parameter is annotated with, None for an argument."""
    return next((each for each in get_args(parameter.annotation) if isinstance(each, OptionInfo)), None)


def _shown(parameter: Parameter) -> Parameter:
    """Return a parameter in the first panel of the help."""
    option = _option(parameter)
    if option is None or option.rich_help_panel != MORE:
        return parameter
    shown = copy(option)
    shown.rich_help_panel = None
    return parameter.replace(annotation=Annotated[get_args(parameter.annotation)[0], shown])


def _print_all(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.meta[_SHOWS_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit()


HELP_ALL = Parameter(
    "help_all",
    Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--help-all", hidden=True, is_eager=True, callback=_print_all)],
)
