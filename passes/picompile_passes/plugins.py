"""What a folder or an installed package adds to the compiler: operators, formats, passes, kernels and so on.

Ours are found in the modules of a folder, either by their type (`members`) or by how a decorator marked them (`mark`,
`marked`). Each `Registry` has those of one kind by name, and those of packages with them. A package offers one by an
entry point, which has the thing's name and leads to the thing. It is imported when its name is asked for.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pkgutil import walk_packages
from typing import Any, Generic, TypeVar

from picompile_passes.errors import RegistryError

T = TypeVar("T")
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def members(package: str, *, skip: tuple[str, ...] = ()) -> list[Any]:
    """Return the values of all modules below `package`, each object once; `skip` names modules to leave out."""
    found: dict[int, Any] = {}
    for module in walk_packages(import_module(package).__path__, f"{package}."):
        if module.name.rpartition(".")[2] not in skip:
            found |= {id(value): value for value in vars(import_module(module.name)).values()}
    return list(found.values())


def mark(key: str, *values: object) -> Callable[[FunctionT], FunctionT]:
    """Mark a function with `values`, as a decorator; `marked` finds it by them."""

    def set_mark(function: FunctionT) -> FunctionT:
        setattr(function, f"__picompile_{key}__", values)
        return function

    return set_mark


def marked(key: str, package: str) -> dict[Any, Any]:
    """Return the functions below `package` by the values that they are marked with.

    Raises:
        RegistryError: If two have the same mark.
    """
    found: dict[Any, Any] = {}
    for function in filter(inspect.isfunction, members(package)):
        for value in getattr(function, f"__picompile_{key}__", ()):
            if found.setdefault(value, function) is not function:
                one, other = (f"{each.__module__}.{each.__qualname__}" for each in (found[value], function))
                raise RegistryError(f"two {key} of {getattr(value, '__name__', value)}: {one} and {other}")
    return found


class Registry(Mapping[str, T], Generic[T]):
    """The things of type `kind` by name.

    Attributes:
        builtin: the names of those that are built in.
    """

    def __init__(
        self,
        noun: str,
        group: str,
        kind: Any,
        builtin: Iterable[T] | Mapping[str, T],
        fault: Callable[[T], str] = lambda thing: "",
    ) -> None:
        """Begin with the things `builtin`: by name, or things that have a `name`.

        `noun` is what errors call one, `group` the group of entry points, and `fault(thing)` says what is wrong with
        the thing of a package, a predicate; nothing if nothing is.
        """
        self._noun, self._group, self._kind, self._fault = noun, group, kind, fault
        self._known = dict(builtin) if isinstance(builtin, Mapping) else {_name(thing): thing for thing in builtin}
        self.builtin = tuple(self._known)

    def __getitem__(self, name: str) -> T:
        """Return the thing called `name`.

        Raises:
            KeyError: If there is none.
            RegistryError: If a package offers it, and it does not import, is of another type, or shares its name.
        """
        if name not in self._known:
            self._known[name] = self._load(self._entry_points()[name])
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names of all, without importing any. Raises `RegistryError` if two have the same name."""
        return iter(dict.fromkeys([*self._known, *self._entry_points()]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def origin(self, name: str) -> str:
        """Return the name of the package that offers `name`, which is built in or a package's."""
        return "picompile" if name in self.builtin else _origin(self._entry_points()[name])

    def add(self, thing: T) -> None:
        """Make `thing` known by its name; the same object again has no effect.

        Raises:
            ValueError: If another one has the name.
        """
        if self._known.setdefault(_name(thing), thing) is not thing:
            raise ValueError(f"there is a {self._noun} {_name(thing)!r} already")

    def _entry_points(self) -> dict[str, EntryPoint]:
        found: dict[str, EntryPoint] = {}
        for point in entry_points(group=self._group):
            if point.name in found:
                raise RegistryError(self._twice(_where(found[point.name]), point))
            if point.name in self.builtin:
                raise RegistryError(self._twice("one from picompile", point))
            if point.name in self._known and self._load(point) is not self._known[point.name]:
                raise RegistryError(self._twice("one that this program added", point))
            found[point.name] = point
        return found

    def _twice(self, one: str, other: EntryPoint) -> str:
        nouns = f"{self._noun}es" if self._noun.endswith("s") else f"{self._noun}s"
        return f"two {nouns} are called {other.name}: {one} and {_where(other)}"

    def _load(self, point: EntryPoint) -> T:
        try:
            thing: Any = point.load()
        except Exception as error:
            raise RegistryError(f"{self._noun} {point.name} from {_origin(point)} does not import: {error}") from error
        if not isinstance(thing, self._kind):
            raise RegistryError(f"{_where(point)} is not a {self._kind.__name__}")
        if fault := self._fault(thing):
            raise RegistryError(f"{_where(point)} {fault}")
        if getattr(thing, "name", point.name) != point.name:
            raise RegistryError(f"{_where(point)} is registered as {point.name} but calls itself {_name(thing)}")
        found: T = thing
        return found


def _name(thing: Any) -> str:
    return str(thing.name)


def _where(point: EntryPoint) -> str:
    return f"{point.value} from {_origin(point)}"


def _origin(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown package"
