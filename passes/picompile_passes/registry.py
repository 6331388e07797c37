"""Passes by name and as text: the built-in ones, and those of installed packages (entry-point group
`picompile.passes`).

A pass is written as text like this: `name{key=value,key2=value}`. The keys are the fields of the pass, with `-` or `_`;
commas inside parentheses or quotes belong to the value. Fields of these types can be given as text: `str`, `int`,
`float`, `bool`, `tuple[T, ...]` and `Sequence[T]`, written `(a,b)`, and `Mapping[K, T]`, written `(k:a,l:b)`. Others
can be given only in Python.
"""

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from picompile_passes import passes
from picompile_passes.base import Pass
from picompile_passes.errors import PassOptionError
from picompile_passes.plugins import Registry, members

_FORM = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9_.-]*)(\{(?P<options>.*)\})?", re.DOTALL)
_QUOTES = "'\""
_BOOLS = {"true": True, "false": False}


def split_pass(text: str) -> tuple[str, dict[str, str]]:
    """Return the name in `text` and its options, whose values are still text.

    Raises:
        PassOptionError: If `text` is not of the form above, or gives an option twice.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise PassOptionError(f"a pass is written name or name{{option=value,...}}, not {text!r}")
    options: dict[str, str] = {}
    for part in _split_commas(match["options"] or ""):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not key or not equals:
            raise PassOptionError(f"an option is written name=value, not {part.strip()!r}, in {text!r}")
        key = key.replace("-", "_")
        if key in options:
            raise PassOptionError(f"option {key} is given twice in {text!r}")
        options[key] = value
    return match["name"], options


def construct(name: str, pass_class: Callable[..., Any], options: dict[str, str]) -> Any:
    """Return an instance of the dataclass `pass_class`, whose fields are read from the texts of `options`.

    Raises:
        PassOptionError: For an option that the pass does not have, a text that its type does not allow, or a required
            option that is missing.
    """
    declared = [field for field in dataclasses.fields(pass_class) if field.init]  # type: ignore[arg-type]
    fields = {field.name for field in declared}
    types = typing.get_type_hints(pass_class)
    values = {}
    for key, text in options.items():
        if key not in fields:
            known = ", ".join(sorted(fields)) or "none"
            raise PassOptionError(f"pass {name} has no option {key}; its options: {known}")
        try:
            values[key] = _read(types[key], text)
        except ValueError as error:
            raise PassOptionError(f"option {key} of pass {name}: {error}") from error
    missing = [field.name for field in declared if _is_required(field) and field.name not in values]
    if missing:
        raise PassOptionError(f"pass {name} needs the option {missing[0]}: {name}{{{missing[0]}=...}}")
    try:
        return pass_class(**values)
    except TypeError as error:
        raise PassOptionError(f"pass {name}: {error}") from error


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _read(kind: Any, text: str) -> Any:
    origin = typing.get_origin(kind) or kind
    if origin in (tuple, Sequence):
        return _read_tuple(kind, text)
    if origin in (dict, Mapping):
        return _read_mapping(kind, text)
    if kind is bool:
        if text.lower() not in _BOOLS:
            raise ValueError(f"{text!r} is neither true nor false")
        return _BOOLS[text.lower()]
    if kind is str:
        return _unquote(text)
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"{text!r} is not {'a whole number' if kind is int else 'a number'}") from None
    raise ValueError("it cannot be given as text, only in Python")


def _read_tuple(kind: Any, text: str) -> tuple[Any, ...]:
    if not (text.startswith("(") and text.endswith(")")):
        raise ValueError(f"{text!r} is not a list in parentheses")
    item, *rest = typing.get_args(kind) or (str, ...)
    if rest not in ([...], []) or (not rest and typing.get_origin(kind) is tuple):
        raise ValueError("it cannot be given as text, only in Python")
    # A comma may end the list, as in Python.
    return tuple(_read(item, part.strip()) for part in _split_commas(text[1:-1].strip().removesuffix(",")))


def _read_mapping(kind: Any, text: str) -> dict[Any, Any]:
    if not (text.startswith("(") and text.endswith(")")):
        raise ValueError(f"{text!r} is not a list of key:value in parentheses")
    key_kind, value_kind = typing.get_args(kind) or (str, str)
    values: dict[Any, Any] = {}
    for part in _split_commas(text[1:-1]):
        key, colon, value = (piece.strip() for piece in part.partition(":"))
        if not colon:
            raise ValueError(f"{part.strip()!r} is not written key:value")
        number = _read(key_kind, key)
        if number in values:
            raise ValueError(f"{key} is given twice")
        values[number] = _read(value_kind, value)
    return values


def _split_commas(text: str) -> list[str]:
    """Split `text` at the commas outside of parentheses and quotes. A blank text has no parts."""
    parts, depth, quote, start = [], 0, "", 0
    for position, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES:
            quote = character
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    if depth or quote:
        raise PassOptionError(f"a {'quote' if quote else 'parenthesis'} is not closed in {text!r}")
    return [*parts, text[start:]] if text.strip() else []


def _unquote(text: str) -> str:
    quoted = len(text) >= 2 and text[0] in _QUOTES and text[-1] == text[0]
    return text[1:-1] if quoted else text


def _fault(thing: Any) -> str:
    """Return why `thing` is no pass, or nothing if it is one."""
    if not (inspect.isclass(thing) and issubclass(thing, Pass)):
        return "is not a subclass of Pass"
    return "" if is_dataclass(thing) and not inspect.isabstract(thing) else "is not a dataclass with a rewrite method"


PASSES = Registry[type[Pass]](
    "pass", "picompile.passes", object, (each for each in members(passes.__name__) if not _fault(each)), _fault
)


def find_pass(name: str) -> type[Pass]:
    """Return the class of the pass `name`.

    Raises:
        PassOptionError: If there is no such pass.
        RegistryError: If it cannot be imported or is not a pass, or if two passes have the same name.
    """
    if name not in (known := sorted(PASSES)):
        raise PassOptionError(f"there is no pass {name}; there are {', '.join(known)}")
    return PASSES[name]


def make_pass(text: str) -> Pass:
    """Return the pass that `text` describes: `name` or `name{option=value,...}`.

    Raises:
        PassOptionError: For an unknown name or option, or a value that cannot be read.
        RegistryError: If the pass cannot be imported or is not a pass.
    """
    name, options = split_pass(text)
    made: Pass = construct(name, find_pass(name), options)
    return made
