"""Firing by profile, by name and by share."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from picompile.errors import UsageError
from picompile.placement.firing import CURVES, Firing, computed_ratios, firing_of_curve, firing_of_profile
from picompile.predictors.profile.profile import LayerProfile, Profile
from picompile.predictors.store import LayerPredictor, Predictors
from picompile.synth.rates import beta_rates, share_of_firings


class Counted(Profile):
    """A profile of counts that are given, not read."""

    def counts(self, layer: int) -> torch.Tensor:
        return COUNTS[layer]


COUNTS = {number: torch.from_numpy(np.random.default_rng(number).integers(0, 51, 97)) for number in (0, 2)}
TOKENS = 50


def profile() -> Profile:
    layers = [LayerProfile(layer, len(counts), 0.0, 0.1, 0.5, 0, "stream") for layer, counts in COUNTS.items()]
    return Counted(Path("some"), "00", "model", 5, tuple(layers), 10, TOKENS, 1, (), "text", 10)


def hot(shares: NDArray[np.float64]) -> float:
    """The share of the neurons that makes 80 % of the firings."""
    return share_of_firings(shares.ravel())


def stacked(firing: Firing) -> NDArray[np.float64]:
    return np.stack([layer.shares for layer in firing.layers])


def test_profile_is_sorted() -> None:
    firing = firing_of_profile(profile())
    assert len(firing.layers) == 2
    for layer, counts in zip(firing.layers, COUNTS.values(), strict=True):
        assert layer.order is not None
        expected = sorted(range(len(counts)), key=lambda neuron: (-int(counts[neuron]), neuron))
        assert layer.order.tolist() == expected
        assert layer.shares.dtype == np.float64
        assert layer.shares.tolist() == [int(counts[neuron]) / TOKENS for neuron in expected]


def test_profile_with_predictors_and_batch() -> None:
    plain = firing_of_profile(profile())
    firing = firing_of_profile(profile(), 3, {2: 1.7})
    expected = 1 - (1 - plain.layers[0].shares) ** 3
    np.testing.assert_allclose(firing.layers[0].shares, expected)
    more = 1 - (1 - np.minimum(1, plain.layers[1].shares * 1.7)) ** 3
    np.testing.assert_allclose(firing.layers[1].shares, more)
    assert (firing.layers[1].shares <= 1).all()


@settings(max_examples=30)
@given(
    text=st.sampled_from((*CURVES, "10%", "0.3", "7%:35%", "100%", "60%")),
    layers=st.integers(1, 9),
    neurons=st.integers(1, 300),
    sequences=st.integers(1, 5),
    computed=st.floats(1, 8),
)
def test_shares_of_a_curve_descend(text: str, layers: int, neurons: int, sequences: int, computed: float) -> None:
    firing = firing_of_curve(text, layers, neurons, sequences, computed)
    shares = stacked(firing)
    assert shares.shape == (layers, neurons)
    assert shares.dtype == np.float64
    assert shares.min() >= 0 and shares.max() <= 1
    assert (np.diff(shares, axis=1) <= 0).all()
    assert all(layer.order is None for layer in firing.layers)
    assert (shares >= stacked(firing_of_curve(text, layers, neurons)) * (1 - 1e-12)).all()


@pytest.mark.parametrize(
    ("name", "layers", "active", "of_layer", "of_model"),
    [("opt", 48, 0.03, 0.26, 0.17), ("reglu-70b", 80, 0.18, 0.43, 0.26)],
)
def test_curves_are_those_of_the_paper(name: str, layers: int, active: float, of_layer: float, of_model: float) -> None:
    shares = stacked(firing_of_curve(name, layers, 4000))
    assert shares.mean() == pytest.approx(active, rel=1e-6)
    assert hot(shares) == pytest.approx(of_model, abs=0.003)
    assert float(np.median([hot(layer) for layer in shares])) == pytest.approx(of_layer, abs=0.003)
    # Deeper layers fire more.
    assert (np.diff(shares.mean(1)) > 0).all()
    for curve in CURVES:
        assert stacked(firing_of_curve(curve, 7, 1500)).mean() == pytest.approx(CURVES[curve].active, rel=1e-3)


def test_plain_shares() -> None:
    for text in ("12.5%", " 0.125 "):
        for layer in firing_of_curve(text, 3, 777).layers:
            assert layer.shares.tolist() == beta_rates(0.125, 777)[::-1].tolist()
    for share, few in ((0.1, 0.3), (0.03, 0.2), (0.4, 0.6)):
        shares = firing_of_curve(f"{share}:{few}", 1, 1000).layers[0].shares
        assert shares.mean() == pytest.approx(share, rel=1e-6)
        assert hot(shares) == pytest.approx(few, abs=0.003)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("", "gpt", "0%", "-1%", "110%", "nan", "10%:", ":10%", "10%:20%:30%", "1e-9"), "no firing curve: name opt, "),
        (("10%:2%", "10%:79%", "50%:20%", "1%:0"), r"from 0\.\d\d to 0\.\d\d of them can make 80 %"),
    ],
    ids=["unknown", "impossible"],
)
def test_wrong_curves_are_refused(texts: Sequence[str], message: str) -> None:
    for text in texts:
        with pytest.raises(UsageError, match=message):
            firing_of_curve(text, 2, 10)


def test_ratios_of_predictors() -> None:
    layers = (
        LayerPredictor(0, "learned", "block", 8, firing_share=0.1, computed_share=0.13),
        LayerPredictor(1, "learned", "block", 8, firing_share=0.0, computed_share=0.0),
        LayerPredictor(2, "sign", threshold=0.5),
        LayerPredictor(3, "exact"),
    )
    ratios = computed_ratios(Predictors(Path("some"), layers, {}))
    assert ratios == {0: pytest.approx(1.3), 1: 1.2, 2: 6.0, 3: 1.0}
