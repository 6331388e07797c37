"""Registries: the things of one kind by name, built-in ones and those that installed packages offer.

A package offers one by an entry point, which has the thing's name and leads to the thing. It is imported when its name
is asked for.
"""

from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from picompile_passes.errors import RegistryError

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """The things of type `kind`, each of which has a `name`.

    Attributes:
        builtin: the names of those that are built in.
    """

    def __init__(self, noun: str, group: str, kind: Callable[..., T], builtin: tuple[T, ...]) -> None:
        """Begin with the things `builtin`; `noun` is what errors call one, `group` the group of entry points."""
        self._noun, self._group, self._kind = noun, group, kind
        self._known = {_name(thing): thing for thing in builtin}
        self.builtin = tuple(self._known)

    def __getitem__(self, name: str) -> T:
        """Return the thing called `name`.

        Raises:
            KeyError: If there is none.
            RegistryError: If a package offers it, and it does not import, is of another type, or shares its name.
        """
        if name not in self._known:
            self.add(self._load(self._entry_points()[name]))
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names of all, without importing any. Raises `RegistryError` if two have the same name."""
        return iter(dict.fromkeys([*self._known, *self._entry_points()]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

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
        return f"two {self._noun}s are called {other.name}: {one} and {_where(other)}"

    def _load(self, point: EntryPoint) -> T:
        try:
            thing: Any = point.load()
        except Exception as error:
            raise RegistryError(f"{self._noun} {point.name} from {_origin(point)} does not import: {error}") from error
        if not isinstance(thing, self._kind):  # type: ignore[arg-type]
            raise RegistryError(f"{_where(point)} is not a {self._kind.__name__}")
        if _name(thing) != point.name:
            raise RegistryError(f"{_where(point)} is registered as {point.name} but calls itself {_name(thing)}")
        found: T = thing
        return found


def _name(thing: Any) -> str:
    return str(thing.name)


def _where(point: EntryPoint) -> str:
    return f"{point.value} from {_origin(point)}"


def _origin(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown package"
