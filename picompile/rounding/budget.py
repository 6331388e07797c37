"""A format for each matrix, within a budget of bits, such that the total loss is least.

Choose a format f(u) for each unit u to

    minimize Σ loss[u, f(u)]   subject to   Σ weights[u] · bits[f(u)] ≤ budget · Σ weights[u],

or, for a bound on the loss, the reverse: the fewest bits. HiGHS solves both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import highspy

from picompile.choices import BUDGET_FORMATS
from picompile_passes.formats import FORMATS

# Losses are far below 1, where HiGHS works with tolerances of 1e-6.
_LARGEST_LOSS = 1e4


@dataclass(frozen=True)
class MatrixUnit:
    """Matrices that share a format: the names of their `parameters`, and their number of `weights`.

    `losses` has the loss of each format of `BUDGET_FORMATS` alone, all else as it is in the checkpoint.
    """

    name: str
    parameters: tuple[str, ...]
    weights: int
    losses: Mapping[str, float]


def fit_budget(units: Sequence[MatrixUnit], bits: float) -> dict[str, str]:
    """Return the format of each unit, by its name, that loses least within `bits` bits a weight on average."""
    total = sum(unit.weights for unit in units)
    sizes = [{form: unit.weights / total * FORMATS[form].bits for form in BUDGET_FORMATS} for unit in units]
    return _by_unit(units, least_cost([unit.losses for unit in units], sizes, bits))


def fit_loss(units: Sequence[MatrixUnit], bound: float) -> dict[str, str]:
    """Return the format of each unit, by its name, that takes the fewest bits and loses at most `bound` altogether.

    Where no choice does, each unit gets the format of its least loss.
    """
    least = sum(min(unit.losses.values()) for unit in units)
    if least >= bound:
        return {unit.name: min(BUDGET_FORMATS, key=lambda form: unit.losses[form]) for unit in units}
    total = sum(unit.weights for unit in units)
    sizes = [{form: unit.weights / total * FORMATS[form].bits for form in BUDGET_FORMATS} for unit in units]
    return _by_unit(units, least_cost(sizes, [unit.losses for unit in units], bound))


def _by_unit(units: Sequence[MatrixUnit], forms: Sequence[str]) -> dict[str, str]:
    return {unit.name: form for unit, form in zip(units, forms, strict=True)}


@dataclass(frozen=True)
class ChosenFormats:
    """A format for each matrix, by the name of its parameter; and the bits and the loss of all together."""

    formats: Mapping[str, str]
    bits_per_weight: float
    loss_nats: float
    """Estimated: the sum of what each matrix loses alone, a token."""


def chosen_formats(units: Sequence[MatrixUnit], forms: Mapping[str, str]) -> ChosenFormats:
    """Return the formats `forms` of units as those of their parameters."""
    return ChosenFormats(
        {name: forms[unit.name] for unit in units for name in unit.parameters},
        mean_bits(units, forms),
        sum(unit.losses[forms[unit.name]] for unit in units),
    )


def mean_bits(units: Sequence[MatrixUnit], forms: Mapping[str, str]) -> float:
    """Return the bits of a weight on average, with the formats `forms` of units by their names."""
    return sum(unit.weights * FORMATS[forms[unit.name]].bits for unit in units) / sum(unit.weights for unit in units)


def least_cost(
    costs: Sequence[Mapping[str, float]], sizes: Sequence[Mapping[str, float]], limit: float, gap: float = 1e-6
) -> list[str]:
    """Return a choice for each unit, such that their costs are least and their sizes add up to at most `limit`.

    Args:
        costs: the cost of each of a unit's choices. Some choice of all units fits.
        sizes: their sizes.
        limit: above 0.
        gap: how far the cost may be from the least one, as a share of it.
    """
    # highspy has no type annotations.
    make: Any = highspy.Highs
    solver = make()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("mip_rel_gap", gap)
    scale = _LARGEST_LOSS / max(max(cost.values()) for cost in costs)
    chosen = [{form: solver.addBinary() for form in cost} for cost in costs]
    for of_unit in chosen:
        solver.addConstr(solver.qsum(of_unit.values()) == 1)
    pairs = [(place, form) for place, of_unit in enumerate(chosen) for form in of_unit]
    solver.addConstr(solver.qsum(chosen[u][form] * (sizes[u][form] / limit) for u, form in pairs) <= 1.0)
    solver.minimize(solver.qsum(chosen[u][form] * (costs[u][form] * scale) for u, form in pairs))
    values = [{form: solver.val(variable) for form, variable in of_unit.items()} for of_unit in chosen]
    return [max(of_unit, key=of_unit.__getitem__) for of_unit in values]
