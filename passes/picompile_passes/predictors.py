"""Predictor kinds by name: ours, those that installed packages offer, and those that a program adds.

An entry point of the group `picompile.predictors` has the kind's name and leads to a `PredictorKind`. It is imported
when a graph or a pass names it. `add_predictor_kind` adds one from a program, before graphs that use it are made.
"""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter

from picompile_passes.errors import RegistryError
from picompile_passes.predictor_kinds import BUILTIN_KINDS, PredictorKind

__all__ = ["ENTRY_POINT_GROUP", "PredictorKind", "add_predictor_kind", "predictor_kind", "predictor_kinds"]

ENTRY_POINT_GROUP = "picompile.predictors"

_KINDS = {kind.name: kind for kind in BUILTIN_KINDS}


def predictor_kind(name: str) -> PredictorKind:
    """The kind called `name`.

    Raises `ValueError` for one that is not known, and `RegistryError` for one that a package offers and that does not
    import, is no kind, or has a name that is given twice.
    """
    if name in _KINDS:
        return _KINDS[name]
    points = _entry_points()
    if name not in points:
        raise ValueError(f"unknown predictor kind {name!r}; known are {', '.join([*_KINDS, *points])}")
    add_predictor_kind(_load(points[name]))
    return _KINDS[name]


def add_predictor_kind(kind: PredictorKind) -> None:
    """Makes `kind` known by its name to the operator `predict`, to passes and to the verifier.

    Adding the same object again has no effect. Raises `ValueError` where another kind has the name.
    """
    if _KINDS.setdefault(kind.name, kind) is not kind:
        raise ValueError(f"there is a predictor kind {kind.name!r} already")


def predictor_kinds() -> tuple[str, ...]:
    """Names of all kinds; imports none. Raises `RegistryError` for a name that is given twice."""
    return tuple(dict.fromkeys([*_KINDS, *_entry_points()]))


def _entry_points() -> Mapping[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name in found:
            raise RegistryError(_twice(_where(found[point.name]), point))
        if point.name in map(attrgetter("name"), BUILTIN_KINDS):
            raise RegistryError(_twice("one from picompile", point))
        if point.name in _KINDS and _load(point) is not _KINDS[point.name]:
            raise RegistryError(_twice("one that this program added", point))
        found[point.name] = point
    return found


def _twice(one: str, other: EntryPoint) -> str:
    return f"two predictor kinds are called {other.name}: {one} and {_where(other)}"


def _load(point: EntryPoint) -> PredictorKind:
    try:
        kind = point.load()
    except Exception as error:
        raise RegistryError(f"predictor kind {point.name} from {_origin(point)} does not import: {error}") from error
    if not isinstance(kind, PredictorKind):
        raise RegistryError(f"{_where(point)} is not a PredictorKind")
    if kind.name != point.name:
        raise RegistryError(f"{_where(point)} is registered as {point.name} but calls itself {kind.name}")
    return kind


def _where(point: EntryPoint) -> str:
    return f"{point.value} from {_origin(point)}"


def _origin(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown package"
