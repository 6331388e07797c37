"""The parameters of commands, made of options that are declared elsewhere: on fields of dataclasses, or in a table.

    def compile_command(model: ModelArgument, options: CompileOptions) -> None:

`takes_options` makes a command of this function, which has the model and every option of `CompileOptions`; the function
gets the dataclass. A value is parsed, and the dataclass checks it, before the function is called.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from picompile.cli.help import HELP_ALL, MORE, set_short_texts, with_short_help
from picompile.frontend.activation import ACTIVATION
from picompile.options import OVERWRITE, Option, check_value, options_of
from picompile_runtime.run_options import RUN_OPTIONS, RunOption


@dataclass(frozen=True)
class _Declared:
    """An option of a command: what `Option` has, and the name, the type and the default of its value."""

    name: str
    kind: Any
    default: Any
    option: Option

    @property
    def flag(self) -> str:
        """The spelling of the option; a flag that is set by default has one more, which unsets it."""
        words = self.name.replace("_", "-")
        if self.option.flags:
            return self.option.flags[-1]
        return f"--{words}/--no-{words}" if self.default is True else f"--{words}"

    @property
    def is_repeated(self) -> bool:
        """Whether the option may be given several times."""
        return get_origin(self.kind) is tuple

    @property
    def alias(self) -> str:
        """The parameter that has the value of an alias."""
        return f"{self.name}_alias"

    def parameters(self) -> Iterator[Parameter]:
        """Yield the parameter of the option, and one that is not listed for its aliases."""
        kind, default = self._typer_kind(), self.option.written or self.default
        if self.option.choices and default is not None:
            default = kind(default)
        if default is None or default == ():
            kind, default = kind | None, None
        yield _parameter(self.name, typer_option(kind, self.option, self.flag), default)
        if self.option.aliases:
            hidden = typer.Option(*self.option.aliases, hidden=True)
            yield _parameter(self.alias, Annotated[kind | None, hidden], None)

    def _typer_kind(self) -> Any:
        """Return the type that typer makes of the option's text; `Option.parse` makes the value of it."""
        if self.option.choices:
            return Enum(self.name, {choice: choice for choice in self.option.choices}, type=str)
        if not self.is_repeated:
            return self.kind if self.option.parse is None else str
        item = get_args(self.kind)[0]
        return list[next(iter(get_args(item)), item)]  # type: ignore[misc]

    def take(self, given: dict[str, Any]) -> Any:
        """Return the value that the command was given, taken out of the values of its parameters."""
        value, other = given.pop(self.name), given.pop(self.alias, None)
        value = value if other in (None, []) else other
        if self.is_repeated:
            return tuple(value or ())
        if self.option.parse is not None and value is not None:
            value = self.option.parse(value, self.flag)
        value = value.value if isinstance(value, Enum) else value
        check_value(self.flag, self.kind, value, self.option)
        return value


def takes_options(function: Callable[..., None]) -> Callable[..., None]:
    """Return the command of `function`, which has an option for each that the annotations of its parameters name.

    A dataclass stands for the options of its fields; `Annotated[kind, Option(...)]` is one option, and
    `Annotated[dict[str, Any], RUN_OPTIONS]` are those of a table of the runtime.
    """
    parameters: list[Parameter] = []
    made: dict[str, Callable[[dict[str, Any]], Any]] = {}
    short: dict[str, str] = {}
    for name, hint in get_type_hints(function, include_extras=True).items():
        if name == "return":
            continue
        default = signature(function).parameters[name].default
        kind, option = get_args(hint)[:2] if get_origin(hint) is Annotated else (hint, None)
        if isinstance(kind, type) and is_dataclass(kind):
            declared = [_Declared(each.name, each.type, each.default, found) for each, found in options_of(kind)]
            made[name] = partial(_make, kind, declared)
        elif isinstance(option, Mapping):
            # Those of a command line of the runtime; each command has its own for debugging.
            declared = [_declared_run_option(each) for key, each in option.items() if key != "debug"]
            made[name] = partial(_make, dict, declared)
        elif isinstance(option, Option):
            declared = [_Declared(name, kind, default, option)]
            made[name] = declared[0].take
        else:
            parameters.append(_parameter(name, hint, default))
            continue
        parameters += (parameter for each in declared for parameter in each.parameters())
        short |= {each.name: _marked(each.option.short) for each in declared if each.option.short is not None}

    parameters = with_short_help(parameters)

    @wraps(function)
    def command(**given: Any) -> None:
        given.pop(HELP_ALL.name, None)
        values = {name: make(given) for name, make in made.items()}
        function(**given, **values)

    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    set_short_texts(command, short)
    return command


def _make(kind: Any, declared: Sequence[_Declared], given: dict[str, Any]) -> Any:
    return kind(**{each.name: each.take(given) for each in declared})


def _parameter(name: str, kind: Any, default: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=default)


def typer_option(kind: Any, option: Option, flag: str, **more: Any) -> Any:
    """Return the annotation of a parameter that is `option`, with values of the type `kind`."""
    whole = kind in (int, int | None)
    least, most = (int(bound) if whole and bound is not None else bound for bound in (option.least, option.most))
    metavar = option.metavar or "|".join(option.choices) or None
    facts = {"help": _marked(option.help), "metavar": metavar, "envvar": option.env, "min": least, "max": most, **more}
    facts["rich_help_panel"] = None if option.common else MORE
    return Annotated[kind, typer.Option(*(option.flags or (flag,)), **facts)]


def _marked(text: str) -> str:
    """Return an option's help in rich's markup."""
    return re.sub("`(.*?)`", r"[bold]\1[/]", text.replace("[", r"\["))


def of_run_option(option: RunOption) -> Option:
    """Return an option that the runtime declares, for its own command lines."""
    return Option(option.text, option.metavar, option.names, least=option.least, most=option.most, common=option.common)


def _declared_run_option(option: RunOption) -> _Declared:
    kind: Any = tuple[str, ...] if option.repeated else option.kind
    default = () if option.repeated else option.unset
    return _Declared(option.key, kind if default is not None else kind | None, default, of_run_option(option))


def _set_debug(context: typer.Context, wanted: bool) -> bool:
    if wanted:
        context.obj.debug = True
    return wanted


# Eager, so that it counts for errors in the options after it as well.
DebugOption = Annotated[
    bool,
    typer.Option("--debug", help=RUN_OPTIONS["debug"].help, callback=_set_debug, is_eager=True, rich_help_panel=MORE),
]
JsonOption = Annotated[bool, of_run_option(RUN_OPTIONS["json"])]
ThreadsOption = Annotated[int | None, of_run_option(RUN_OPTIONS["threads"])]
ReplanOption = Annotated[bool, of_run_option(RUN_OPTIONS["replan"])]
DraftOption = Annotated[str, of_run_option(RUN_OPTIONS["draft"])]
# `picompile.hub` and `picompile.library` make paths of these.
COMPILED_HELP = "An artifact; or a name on the hub, a Hugging Face folder or a GGUF file, compiled on first use."
CompiledArgument = Annotated[str, typer.Argument(metavar="MODEL", help=COMPILED_HELP)]
ArtifactArgument = Annotated[
    str, typer.Argument(metavar="ARTIFACT", help="A compiled model's folder, or the name of a model in picompile list.")
]
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face folder (config.json, *.safetensors), a GGUF file, or a name on the hub: ORG/REPO, "
        "ORG/REPO:Q4_K_M.",
    ),
]
ActivationOption = Annotated[str | None, ACTIVATION]
OverwriteOption = Annotated[bool, OVERWRITE]
FolderOutputOption = Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="The folder to make.")]
