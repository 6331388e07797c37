"""Placement programs against brute force over everything that can be chosen."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from picompile.placement.local_search import CheapestSides
from picompile.placement.pieces import lower_hull
from picompile.placement.problem import Choice, PlacementProblem, PlacementStage, StagePlace, Totals, evaluate
from picompile.placement.solver import Solution, solve

SEEDS = st.integers(0, 2**32 - 1)


def random_program(seed: int) -> PlacementProblem:
    """Up to three stages of up to three choices of up to five numbers of groups, with costs of any form."""
    rng = np.random.default_rng(seed)
    stages = []
    for _ in range(rng.integers(1, 4)):
        size, groups = int(rng.integers(1, 6)), int(rng.integers(0, 5))
        total = int(rng.integers(0, 5)) + groups * size
        choices = []
        for number in range(rng.integers(1, 4)):
            on_accelerator = int(rng.integers(0, total - groups * size + 1))
            costs = _costs(rng, groups + 1)
            choices.append(Choice(number, on_accelerator, total - on_accelerator, costs, 0, bool(rng.integers(0, 2))))
        stages.append(PlacementStage(tuple(choices), size))
    switch_cost = float(rng.random() * 2 * (rng.random() < 0.7))
    gpu, host = int(rng.integers(0, 30)), int(rng.integers(0, 40))
    return PlacementProblem(tuple(stages), gpu, host, switch_cost, bool(rng.integers(0, 2)))


def _costs(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return costs of any form, falling, convex, or concave and negative."""
    values = rng.random(count)
    kind = rng.integers(0, 4)
    if kind == 0:
        return values * 10
    if kind == 1:
        return np.sort(values)[::-1] * 5
    if kind == 2:
        return np.cumsum(np.sort(-values)) + 20
    return -np.cumsum(np.sort(values))


def random_early_program(seed: int) -> PlacementProblem:
    """A random problem in which some choices predict early, and some cost less before one that does."""
    program, rng = random_program(seed), np.random.default_rng(seed)
    stages = []
    for stage in program.stages:
        choices = [_with_early(choice, rng) for choice in stage.choices]
        stages.append(replace(stage, choices=tuple(choices)))
    return replace(program, stages=tuple(stages))


def _with_early(choice: Choice, rng: np.random.Generator) -> Choice:
    saved = rng.random(len(choice.costs)) * rng.choice([0.5, 5.0])
    early = choice.costs - saved if rng.random() < 0.7 else None
    return replace(choice, predicts_early=bool(rng.integers(0, 2)), early_costs=early)


def brute_force(program: PlacementProblem) -> Totals | None:
    options = [
        [
            StagePlace(number, groups)
            for number, choice in enumerate(stage.choices)
            for groups in range(choice.first, choice.last + 1)
        ]
        for stage in program.stages
    ]
    found = (evaluate(program, places) for places in product(*options))
    return min((totals for totals in found if totals.fits(program)), default=None, key=lambda totals: totals.cost)


def check(program: PlacementProblem, solution: Solution | None, best: Totals | None, gap: float) -> None:
    if best is None or solution is None:
        assert solution is None
        assert best is None
        return
    rounding = 1e-7 * max(1.0, abs(best.cost))
    assert solution.totals == evaluate(program, solution.places)
    assert solution.totals.fits(program)
    assert best.cost - rounding <= solution.totals.cost <= best.cost + gap * abs(solution.totals.cost) + rounding
    assert solution.bound <= best.cost + rounding


def random_places(program: PlacementProblem, seed: int) -> list[StagePlace]:
    """Places of which many have everything on the accelerator."""
    rng = np.random.default_rng(seed)
    places = []
    for stage in program.stages:
        number = 0 if rng.random() < 0.5 else int(rng.integers(len(stage.choices)))
        choice = stage.choices[number]
        places.append(StagePlace(number, int(rng.integers(choice.first, choice.last + 1))))
    return places


# Seeds that found faults: prices of sides at a bound, limits of kinds that another program has.
@given(SEEDS, st.sampled_from([0.0, 1e-4, 0.02, 0.5]), st.sampled_from([random_program, random_early_program]))
@example(287, 0.0, random_program)
@example(1471, 0.0, random_program)
def test_the_solution_is_the_best_of_all_but_for_the_gap(
    seed: int, gap: float, draw: Callable[[int], PlacementProblem]
) -> None:
    """And never worse than a placement that is known, however wide the gap."""
    program = draw(seed)
    best, known = brute_force(program), random_places(program, seed)
    check(program, solve(program, gap=gap), best, gap=gap)
    totals, solution = evaluate(program, known), solve(program, gap=0.5, known=[known])
    check(program, solution, best, gap=0.5)
    assert solution is None or not totals.fits(program) or solution.totals.cost <= totals.cost


def test_a_stage_waits_for_nobody_unless_the_next_predicts_early() -> None:
    """The saving is had where the next stage predicts early, even if that stage alone is dearer so."""
    before = Choice("accelerator", 1, 0, np.asarray([5.0]), early_costs=np.asarray([2.0]))
    late, early = Choice("late", 0, 1, np.asarray([1.0])), Choice("early", 1, 0, np.asarray([3.0]), predicts_early=True)
    stages = PlacementStage((before,)), PlacementStage((late, early))
    for capacity, choice, cost in ((2, 1, 5.0), (1, 0, 6.0)):
        solution = solve(PlacementProblem(stages, capacity, 10), gap=0.0)
        assert solution is not None
        assert (solution.places[1].choice, solution.totals.cost) == (choice, cost)


def test_stages_that_are_all_alike() -> None:
    """Any of them can be on the GPU: the number is what counts, and HiGHS is not to try them by turns."""
    costs = np.asarray([4.0, 3.0, 2.5, 2.4, 0.9])
    here, there = Choice("here", 3, 9, costs), Choice("there", 0, 12, costs + 5, 0, False)
    for capacity in range(0, 60, 7):
        program = PlacementProblem(tuple(PlacementStage((here, there), 2) for _ in range(5)), capacity, 100, 0.1, True)
        check(program, solve(program, gap=0.0), _brute_force_of_alike(program), gap=0.0)


def _brute_force_of_alike(program: PlacementProblem) -> Totals | None:
    """Return the best totals of stages that are alike: only the number of stages at each place counts."""
    stage = program.stages[0]
    places = [StagePlace(c, n) for c, choice in enumerate(stage.choices) for n in range(len(choice.costs))]
    found = []
    for taken in itertools.combinations_with_replacement(places, len(program.stages)):
        found.append(evaluate(program, taken))
    return min((totals for totals in found if totals.fits(program)), default=None, key=lambda totals: totals.cost)


def test_capacities_count_to_the_byte() -> None:
    """Sizes as models have them, and a program that fits exactly, and not with a byte less."""
    rng = np.random.default_rng()
    groups, size = 40, int(rng.integers(10**6, 2 * 10**6))
    costs = np.linspace(1, 0.1, groups + 1) ** 2
    stages = tuple(
        PlacementStage((Choice("accelerator", 7 * 10**8 + stage, groups * size, costs),), size) for stage in range(9)
    )
    whole = 9 * (7 * 10**8 + groups * size) + 36
    assert whole == evaluate(PlacementProblem(stages, 0, 0), [StagePlace(0, groups)] * 9).gpu_bytes
    fits = solve(PlacementProblem(stages, whole, 10**12), gap=0.0)
    assert fits is not None
    assert [place.groups for place in fits.places] == [groups] * 9
    less = solve(PlacementProblem(stages, whole - 1, 10**12), gap=0.0)
    assert less is not None
    assert sum(place.groups for place in less.places) == 9 * groups - 1
    least = 9 * 7 * 10**8 + 36
    assert solve(PlacementProblem(stages, least - 1, 10**12)) is None
    assert solve(PlacementProblem(stages, least, 10**12)) is not None


@given(SEEDS)
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
