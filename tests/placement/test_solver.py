"""Placement programs against brute force over everything that can be chosen."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from picompile.placement.problem import Choice, PlacementProblem, PlacementStage, StagePlace, Totals, evaluate
from picompile.placement.solver import Solution, solve


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


def brute_force(program: PlacementProblem) -> Totals | None:
    options = [
        [
            StagePlace(number, groups)
            for number, choice in enumerate(stage.choices)
            for groups in range(choice.first, choice.last + 1)
        ]
        for stage in program.stages
    ]
    found = (evaluate(program, places) for places in itertools.product(*options))
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


# Seeds that found faults: prices of sides at a bound, limits of kinds that another program has.
@given(st.integers(0, 2**32 - 1))
@example(287)
@example(1471)
def test_the_solution_is_the_best_of_all(seed: int) -> None:
    program = random_program(seed)
    check(program, solve(program, gap=0.0), brute_force(program), gap=0.0)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-4, 0.02, 0.5]))
def test_cost_exceeds_the_optimum_by_at_most_the_gap(seed: int, gap: float) -> None:
    program = random_program(seed)
    check(program, solve(program, gap=gap), brute_force(program), gap=gap)


@pytest.mark.slow("solves 500 problems per block; two blocks are fast", but=("0", "1"))
@pytest.mark.parametrize("block", range(4))
def test_many_random_problems_are_solved(block: int) -> None:
    """2,000 in all, beside those that hypothesis draws."""
    for seed in range(500 * block, 500 * (block + 1)):
        program = random_program(seed)
        check(program, solve(program, gap=0.0), brute_force(program), gap=0.0)


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


@given(st.integers(0, 2**32 - 1))
def test_a_known_placement_is_never_better(seed: int) -> None:
    program = random_program(seed)
    rng = np.random.default_rng(seed)
    places = []
    for stage in program.stages:
        number = int(rng.integers(len(stage.choices)))
        places.append(StagePlace(number, int(rng.integers(stage.choices[number].last + 1))))
    known = evaluate(program, places)
    solution = solve(program, gap=0.5, known=[places])
    if known.fits(program):
        assert solution is not None
        assert solution.totals.cost <= known.cost


def test_capacities_count_to_the_byte() -> None:
    """Sizes as models have them, and a program that fits exactly, and not with a byte less."""
    rng = np.random.default_rng()
    groups, size = 40, int(rng.integers(10**6, 2 * 10**6))
    costs = np.linspace(1, 0.1, groups + 1) ** 2
    stages = tuple(
        PlacementStage((Choice("gpu", 7 * 10**8 + stage, groups * size, costs),), size) for stage in range(9)
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


def test_a_problem_with_ample_memory_is_solved() -> None:
    program = random_program(3)
    solution = solve(replace(program, gpu_capacity_bytes=10**6, host_capacity_bytes=10**6))
    assert solution is not None
    assert solution.gap <= 1e-4
