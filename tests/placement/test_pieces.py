"""The lower hull against its definition."""

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from picompile.placement.pieces import lower_hull


def is_vertex(costs: NDArray[np.float64], place: int) -> bool:
    """Whether no line between a point before and a point after it passes at it or below."""
    pairs = product(range(place), range(place + 1, len(costs)))
    return not any(
        (costs[place] - costs[low]) * (high - low) >= (costs[high] - costs[low]) * (place - low) for low, high in pairs
    )


# Whole numbers, with which sums are exact and points on one line are frequent.
@given(st.lists(st.integers(-20, 20), min_size=1, max_size=30))
def test_lower_hull(values: list[int]) -> None:
    costs = np.asarray(values, dtype=np.float64)
    assert lower_hull(costs).tolist() == [place for place in range(len(costs)) if is_vertex(costs, place)]
