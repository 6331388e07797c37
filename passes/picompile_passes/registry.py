"""Passes by name: our own, and those that installed packages offer in the entry-point group `picompile.passes`.

Nothing is imported before it is asked for. An entry point's name must be the `name` of the pass class it leads to.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from picompile_passes.base import Pass
from picompile_passes.errors import PassOptionError, RegistryError
from picompile_passes.options import construct, split_pass
from picompile_passes.passes import BUILTIN

ENTRY_POINT_GROUP = "picompile.passes"


@dataclass(frozen=True)
class Registration:
    """One name: where it leads, who offers it, and how to import it."""

    name: str
    location: str
    origin: str
    load: Callable[[], Any]


def registrations() -> dict[str, Registration]:
    """All passes there are, by name, in order of the names. Raises `RegistryError` for a name that is given twice."""
    found: dict[str, Registration] = {}
    for entry in [*map(_from_table, BUILTIN), *map(_from_entry_point, entry_points(group=ENTRY_POINT_GROUP))]:
        if entry.name in found:
            other = found[entry.name]
            raise RegistryError(
                f"two passes are called {entry.name}: {other.location} from {other.origin} "
                f"and {entry.location} from {entry.origin}"
            )
        found[entry.name] = entry
    return dict(sorted(found.items()))


def find_pass(name: str) -> type[Pass]:
    """The class of the pass `name`.

    Raises `PassOptionError` where there is none, `RegistryError` where it cannot be imported or is not a pass.
    """
    known = registrations()
    if name not in known:
        raise PassOptionError(f"there is no pass {name}; there are {', '.join(known)}")
    registration = known[name]
    try:
        pass_class = registration.load()
    except Exception as error:
        raise RegistryError(f"pass {name} from {registration.origin} does not import: {error}") from error
    _check_class(registration, pass_class)
    found: type[Pass] = pass_class
    return found


def make_pass(text: str) -> Pass:
    """The pass that `text` describes: `name` or `name{option=value,...}`.

    Raises `PassOptionError` for a name, an option or a value that is not known, and what `find_pass` raises.
    """
    name, options = split_pass(text)
    made: Pass = construct(name, find_pass(name), options)
    return made


def _from_table(name: str) -> Registration:
    location = BUILTIN[name]
    module, _, attribute = location.partition(":")
    return Registration(name, location, "picompile", lambda: getattr(importlib.import_module(module), attribute))


def _from_entry_point(point: EntryPoint) -> Registration:
    origin = point.dist.name if point.dist is not None else "an unknown package"
    return Registration(point.name, point.value, origin, point.load)


def _check_class(registration: Registration, found: object) -> None:
    where = f"{registration.location} from {registration.origin}"
    if not (inspect.isclass(found) and issubclass(found, Pass)):
        raise RegistryError(f"{where} is not a subclass of Pass")
    if inspect.isabstract(found) or not is_dataclass(found):
        raise RegistryError(f"{where} is not a dataclass with a rewrite method")
    if found.name != registration.name:
        raise RegistryError(f"{where} is registered as {registration.name} but calls itself {found.name}")
