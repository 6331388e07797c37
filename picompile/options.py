"""Options, each declared once: on a field of a frozen dataclass.

    @dataclass(frozen=True)
    class Sizes:
        sequences: int = option(1, "Sequences that the cache holds.", metavar="N", least=1, most=256)

        def __post_init__(self) -> None:
            check_options(self)

Everything else follows from the field: a command whose parameter is annotated with the class has the option
`--sequences` (`picompile.cli.options`), docs/cli.md has its row, `check_options` refuses other values, and `documented`
writes the list of attributes of the class.
"""

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, TypeVar

from picompile.errors import UsageError
from picompile.quantities import require_whole

_KEY = "option"
_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True)
class Option:
    """The declaration of an option, besides the name, type and default of its field.

    Attributes:
        help: what the option does, in Markdown.
        metavar: what the command line calls its value.
        flags: its spellings on the command line; by default `--` and the field's name.
        aliases: spellings that the command line takes as well, and does not list.
        least, most: the limits of a number, which may have these values.
        above, below: the limits of a number, which may not have these values.
        choices: all values that there are.
        check: raises `UsageError` for a value that is none.
        parse: makes the value of the text that the command line gives; it is told the flag, for its errors.
        env: the environment variable that has another default.
        written: the default as it was written, where `parse` makes it of a text.
        common: whether the short help of a command with many options shows it.
        short: what that short help says in place of `help`, which may be long.
    """

    help: str
    metavar: str | None = None
    flags: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    check: Callable[[Any], object] | None = None
    parse: Callable[[str, str], Any] | None = None
    env: str | None = None
    written: str | None = None
    common: bool = False
    short: str | None = None

    def field(self, default: Any = MISSING, **more: Any) -> Any:
        """Return a dataclass field with this option; a default that is a text is parsed. `more` is for `field`."""
        if self.parse is None or not isinstance(default, str):
            return field(default=default, metadata={_KEY: self}, **more)
        return field(default=self.parse(default, ""), metadata={_KEY: replace(self, written=default)}, **more)


OVERWRITE = Option("Replace what is at this path, if it is of the same kind.", aliases=("--force",), common=True)


def option(default: Any, help: str, *, repr: bool = True, compare: bool = True, **facts: Any) -> Any:
    """Return a dataclass field with an option: its default, what it does, and `facts`, the other fields of `Option`."""
    return Option(help, **facts).field(default, repr=repr, compare=compare)


def options_of(kind: type) -> Iterator[tuple[Field[Any], Option]]:
    """Yield the fields of a dataclass that are options; its own come before those of its bases."""
    home = {
        name: at for at, each in reversed([*enumerate(kind.__mro__)]) for name in vars(each).get("__annotations__", ())
    }
    for each in sorted(fields(kind), key=lambda found: home[found.name]):
        if _KEY in each.metadata:
            yield each, each.metadata[_KEY]


def check_options(options: Any) -> None:
    """Raise `UsageError` for the first field whose value is not one that its option has. None is not checked."""
    for each, declared in options_of(type(options)):
        check_value(each.name, each.type, getattr(options, each.name), declared)


def check_value(name: str, kind: Any, value: Any, declared: Option) -> None:
    """Raise `UsageError` for a value of the type `kind` that the option called `name` does not have."""
    if value is None:
        return
    if kind in (int, int | None):
        require_whole(**{name: value})
    name = name.replace("_", " ")
    if declared.choices and value not in declared.choices:
        raise UsageError(f"unknown {name} {value!r}; known are {', '.join(declared.choices)}")
    limits = [
        (text.format(limit), holds(value, limit))
        for text, limit, holds in (
            ("at least {}", declared.least, operator.ge),
            ("above {}", declared.above, operator.gt),
            ("at most {}", declared.most, operator.le),
            ("below {}", declared.below, operator.lt),
        )
        if limit is not None
    ]
    if not all(kept for _, kept in limits):
        raise UsageError(f"{name} must be {' and '.join(text for text, _ in limits)}, not {value}")
    if declared.check is not None:
        declared.check(value)


def documented(kind: _Class) -> _Class:
    """Return the dataclass `kind` with its options in its docstring."""
    lines = (f"    {each.name}: {declared.help}" for each, declared in options_of(kind))
    kind.__doc__ = "\n".join([f"{inspect.cleandoc(kind.__doc__ or '')}\n\nAttributes:", *lines])
    return kind


def one_of(choices: Sequence[str]) -> str:
    """Return choices as a text has them: `f16, q8 or q4`."""
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last
