"""Ways in which a description in JSON can be damaged."""

import copy
import math
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

Place = tuple[str | int, ...]

# What is never right in place of a number or a text, and what is right in some places.
STRANGE: list[Any] = [
    *(None, True, 0, 1, -1, 10_000, 2**70, 10**400, 0.5, -0.5, 1e300, math.nan, math.inf, -math.inf),
    *("", "x", "7", "a\nb", "\x1b[2J", "\ud800", [], [1], [[]], ["x", 3], {}, {"layer": 0}),
]

strange_values = st.sampled_from(STRANGE) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


def places(content: Any, place: Place = ()) -> Iterator[Place]:
    """Where there is something in a description, its lists and objects included."""
    if place:
        yield place
    inside = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in inside:
        yield from places(value, (*place, key))


def replaced(content: Any, place: Place, value: Any) -> Any:
    """A copy with `value` at `place`."""
    damaged = copy.deepcopy(content)
    _inside(damaged, place[:-1])[place[-1]] = value
    return damaged


def without(content: Any, place: Place) -> Any:
    """A copy without what is at `place`."""
    damaged = copy.deepcopy(content)
    del _inside(damaged, place[:-1])[place[-1]]
    return damaged


def _inside(content: Any, place: Place) -> Any:
    for key in place:
        content = content[key]
    return content
