"""The cheapest sides against all there are."""

from itertools import pairwise, product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from picompile.placement.local_search import CheapestSides


@given(st.integers(0, 2**32 - 1))
def test_cheapest_sides(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stages, switch_cost, from_host = int(rng.integers(1, 8)), float(rng.choice([0.0, 0.1, 1.0])), bool(rng.integers(2))
    host, gpu = (np.where(rng.random(stages) < 0.2, np.inf, rng.normal(size=stages)) for _ in range(2))
    best = [np.inf] * (stages + 1)
    for sides in product((False, True), repeat=stages):
        stream = (False, *sides, False) if from_host else sides
        cost = sum((gpu if side else host)[stage] for stage, side in enumerate(sides))
        cost += switch_cost * sum(before != after for before, after in pairwise(stream))
        best[sum(sides)] = min(best[sum(sides)], cost)
    cheapest = CheapestSides(host, gpu, switch_cost, from_host=from_host)
    assert cheapest.of(-1) is None
    assert cheapest.of(stages + 1) is None
    for count, expected in enumerate(best):
        found = cheapest.of(count)
        if found is None:
            assert expected == np.inf
            continue
        cost, chosen = found
        assert sum(chosen) == count
        np.testing.assert_allclose(cost, expected, rtol=1e-12, atol=1e-12)
        stream = [False, *chosen, False] if from_host else chosen
        again = sum((gpu if side else host)[stage] for stage, side in enumerate(chosen))
        again += switch_cost * sum(before != after for before, after in pairwise(stream))
        np.testing.assert_allclose(again, expected, rtol=1e-12, atol=1e-12)
