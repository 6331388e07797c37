"""Formats for a budget of bits, against all choices that there are."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from picompile.choices import is_budget, parse_bits
from picompile.errors import UsageError
from picompile.rounding.budget import CHOICES, MatrixUnit, fit_budget, fit_loss, mean_bits

_LOSSES = st.floats(1e-9, 0.1)


@st.composite
def _units(draw: st.DrawFn) -> list[MatrixUnit]:
    """A few units; more bits lose less, but not always, since losses are measured."""
    count = draw(st.integers(1, 4))
    return [
        MatrixUnit(f"u{i}", (f"p{i}",), draw(st.integers(32, 10**6)), {form: draw(_LOSSES) for form in CHOICES})
        for i in range(count)
    ]


def _all_choices(units: list[MatrixUnit]) -> list[dict[str, str]]:
    names = [unit.name for unit in units]
    return [dict(zip(names, forms, strict=True)) for forms in itertools.product(CHOICES, repeat=len(units))]


def _loss(units: list[MatrixUnit], forms: dict[str, str]) -> float:
    return sum(unit.losses[forms[unit.name]] for unit in units)


@given(units=_units(), bits=st.floats(4.5, 8.5))
def test_a_budget_is_spent_where_it_saves_most(units, bits):
    found = fit_budget(units, bits)
    assert mean_bits(units, found) <= bits * (1 + 1e-6)
    allowed = [forms for forms in _all_choices(units) if mean_bits(units, forms) <= bits * (1 - 1e-6)]
    if allowed:
        assert _loss(units, found) <= min(_loss(units, forms) for forms in allowed) * (1 + 1e-5) + 1e-9


@given(units=_units(), bound=st.floats(1e-6, 0.2))
def test_a_bound_on_the_loss_takes_the_fewest_bits(units, bound):
    found, least = fit_loss(units, bound), sum(min(unit.losses.values()) for unit in units)
    if least >= bound:
        assert _loss(units, found) == pytest.approx(least)
        return
    assert _loss(units, found) <= bound * (1 + 1e-5)
    allowed = [forms for forms in _all_choices(units) if _loss(units, forms) <= bound * (1 - 1e-5)]
    if allowed:
        assert mean_bits(units, found) <= min(mean_bits(units, forms) for forms in allowed) * (1 + 1e-5)


def test_two_hundred_units_are_chosen_in_a_moment_and_always_alike():
    draw = torch.Generator().manual_seed(0)
    units = [
        MatrixUnit(
            f"u{i}",
            (f"p{i}",),
            4096 * 4096,
            {form: float(torch.rand(1, generator=draw)) / 4**k for k, form in enumerate(CHOICES)},
        )
        for i in range(225)
    ]
    found = fit_budget(units, 5.1)
    assert 5.05 < mean_bits(units, found) <= 5.1 * (1 + 1e-6)
    assert fit_budget(units, 5.1) == found


def test_texts_of_budgets():
    assert parse_bits("5.2bpw") == 5.2
    assert parse_bits("6bpw") == 6.0
    assert parse_bits("q4") is None
    assert [text for text in ("auto", "4.5bpw", "q4", "4.5", "bpw", "-5bpw", "5.2 bpw") if is_budget(text)] == [
        "auto",
        "4.5bpw",
    ]
    for text in ("4.49bpw", "8.6bpw", "0bpw", "99bpw"):
        with pytest.raises(UsageError, match=r"from 4.5 to 8.5 bits"):
            parse_bits(text)
