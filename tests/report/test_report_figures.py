"""Firing curves and shares, against counting by hand; numbers as the page writes them."""

import numpy as np
import pytest

from picompile.report import firing_curve, numbers, share_for, summarize
from picompile.report.profile import sampled


def by_hand(counts: list[int], firings: float) -> float:
    """The smallest share of the neurons that makes this share of the firings."""
    made = 0
    for taken, count in enumerate(sorted(counts, reverse=True), 1):
        made += count
        if made >= firings * sum(counts):
            return taken / len(counts)
    raise AssertionError


@pytest.mark.parametrize("seed", [0, 4])
def test_shares_are_those_counted_by_hand(seed: int) -> None:
    random = np.random.default_rng(seed)
    counts = random.integers(0, 50, 7 + 9 * seed)
    curve = firing_curve(counts)
    assert curve[0] == 0
    assert curve[-1] == pytest.approx(1)
    assert (np.diff(curve) >= 0).all()
    # A concave curve: who comes later fires less.
    assert (np.diff(curve, 2) <= 1e-12).all()
    for firings in (0.05, 0.5, 0.8, 0.99):
        assert share_for(curve, firings) == by_hand(counts.tolist(), firings)


def test_figures_of_a_model_are_of_all_its_neurons() -> None:
    random = np.random.default_rng(3)
    layers = [random.integers(0, 90, 31), random.integers(0, 9, 64)]
    layers[0][4] = 0
    model = summarize(layers, 100)
    together = np.concatenate(layers)
    assert model.neurons == 95
    assert model.firing_share == pytest.approx(together.sum() / 95 / 100)
    assert model.never_fired == (together == 0).sum() > 0
    assert model.neurons_for_80_percent == by_hand(together.tolist(), 0.8)
    # The most active fifth: 19 of 95.
    assert model.skewness == pytest.approx(np.sort(together)[-19:].sum() / together.sum())


def test_neurons_that_never_fire_have_a_flat_curve() -> None:
    assert firing_curve(np.zeros(6, np.int64)).tolist() == [0] * 7
    figures = summarize([np.zeros(6, np.int64)], 10)
    assert (figures.firing_share, figures.never_fired) == (0, 6)
    # Of no firings, nobody makes a share.
    assert (figures.neurons_for_80_percent, figures.skewness) == (None, None)


@pytest.mark.parametrize("neurons", [1, 100, 5000])
def test_a_sampled_curve_keeps_its_ends_and_its_points(neurons: int) -> None:
    curve = firing_curve(np.random.default_rng(neurons).integers(1, 99, neurons))
    x, y = sampled(curve)
    assert len(x) <= 160
    assert (x[0], y[0], x[-1], y[-1]) == (0, 0, 100, pytest.approx(100))
    assert (np.diff(x) > 0).all()
    places = np.rint(x / 100 * neurons).astype(int)
    np.testing.assert_allclose(y, 100 * curve[places])


def test_values_that_are_no_measurements_are_none() -> None:
    for value in (None, True, "1", [], float("nan"), float("inf"), 10**400, 1e300):
        assert (numbers.measured(value), numbers.share(value), numbers.whole(value)) == (None, None, None)
    assert (numbers.whole(-1), numbers.share(1.1), numbers.share(-0.1)) == (None, None, None)
    assert (numbers.share(1 + 1e-9), numbers.share(0)) == (1, 0)
