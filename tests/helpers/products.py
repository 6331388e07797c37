"""Parameters of tests whose whole product would be too much: samples that have every value, and every pair of values.

`make test` has each value once, the tests that are drawn have each pair of values, and the whole product runs with
PICOMPILE_PRODUCTS=whole; `make fuzz` draws from that. All of them have the mark `products`.
"""

import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Row = tuple[Any, ...]


def sampled(
    *,
    slow: str,
    when: Callable[..., bool] = lambda **_: True,
    seed: int = 0,
    fast: Mapping[str, Iterable[Any]] | None = None,
    fixtures: Mapping[str, Iterable[Any]] | None = None,
    **values: Iterable[Any],
) -> pytest.MarkDecorator:
    """Parametrize a test with rows that have every pair of two parameters' values.

    The first rows have every value, and are fast; the others are marked slow. A value can be a `pytest.param`; one that
    is marked slow is in no fast row.

    Args:
        slow: Why most rows are not needed for a first answer.
        when: Tells from a row's values, by name, whether it is one.
        seed: Rows that fit equally well are taken in an order that depends on it.
        fast: The only values that fast rows have of some parameters: those that differ in what the test is about, where
            a cheaper test has every value.
        fixtures: Parameters of fixtures, by the fixtures' names, which are sampled with the others.
        values: Each parameter's values, by name.

    Raises:
        ValueError: If `fast` has a value that its parameter has not, or that no fast row has.
    """
    values = {**(fixtures or {}), **values}
    names = list(values)
    lists = [[value if _is_param(value) else pytest.param(value) for value in values[name]] for name in names]
    rows = [row for row in product(*map(range, map(len, lists))) if when(**_plain(names, lists, row))]
    first = {name: list(only) for name, only in (fast or {}).items()}
    may_be_fast = [row for row in rows if not _has_slow(lists, row) and _has_only(_plain(names, lists, row), first)]
    for name, only in first.items():
        missing = [value for value in only if all(_plain(names, lists, row)[name] != value for row in may_be_fast)]
        if missing:
            raise ValueError(f"no fast row has {name} {missing}")
    fast_rows = cover(may_be_fast, 1, seed)
    chosen = rows if os.environ.get("PICOMPILE_PRODUCTS") == "whole" else cover(rows, 2, seed, fast_rows)
    mark = pytest.mark.slow(slow)
    whole = pytest.mark.products
    parameters = [_joined(lists, row, (whole,) if row in fast_rows else (whole, mark)) for row in chosen]
    return pytest.mark.parametrize(",".join(names), parameters, indirect=list(fixtures or {}))


def cover(rows: Sequence[Row], strength: int, seed: int = 0, begun: Sequence[Row] = ()) -> list[Row]:
    """Return rows that have each combination of `strength` values that any of `rows` has, begun with `begun`.

    Each time the row with the most combinations that are still missing is taken.
    """
    order = list(rows)
    random.Random(seed).shuffle(order)
    missing = {each for row in order for each in _combinations(row, strength)}
    found = list(begun)
    for row in found:
        missing -= _combinations(row, strength)
    while missing:
        best = max(order, key=lambda row: len(missing & _combinations(row, strength)))
        missing -= _combinations(best, strength)
        found.append(best)
    return found


def _combinations(row: Row, strength: int) -> set[tuple[tuple[int, Any], ...]]:
    return set(combinations(enumerate(row), strength))


def _has_only(values: Mapping[str, Any], only: Mapping[str, Sequence[Any]]) -> bool:
    return all(values[name] in allowed for name, allowed in only.items())


def _has_slow(lists: Sequence[Sequence[Any]], row: Row) -> bool:
    return any(mark.name == "slow" for values, index in zip(lists, row, strict=True) for mark in values[index].marks)


def _is_param(value: object) -> bool:
    return isinstance(value, type(pytest.param()))


def _plain(names: Sequence[str], lists: Sequence[Sequence[Any]], row: Row) -> dict[str, Any]:
    return {name: values[index].values[0] for name, values, index in zip(names, lists, row, strict=True)}


def _joined(lists: Sequence[Sequence[Any]], row: Row, marks: Sequence[pytest.MarkDecorator]) -> Any:
    chosen = [values[index] for values, index in zip(lists, row, strict=True)]
    name = "-".join(each.id or _name(each.values[0]) for each in chosen)
    both = [mark for each in chosen for mark in each.marks]
    return pytest.param(*(each.values[0] for each in chosen), id=name, marks=[*both, *marks])


def _name(value: object) -> str:
    if isinstance(value, tuple | list):
        return "x".join(_name(each) for each in value)
    return str(getattr(value, "__name__", value))
