"""The choice over all layers is the best there is, by trying all of them."""

import itertools
import random
from collections.abc import Iterable

import pytest
import torch

from picompile.errors import UsageError
from picompile.predictors.train.candidates import Candidate, LayerResult
from picompile.predictors.train.choose import ChoiceLimits, PredictorChoice, Selection, choose, layer_entry, options_of
from picompile.predictors.train.data import RecallCurve, measure_curve


def _curve(draw: torch.Generator, sharpness: float) -> RecallCurve:
    scores = torch.randn(400, 20, generator=draw)
    fires = scores * sharpness + torch.randn(400, 20, generator=draw) > 1.0
    return measure_curve(iter([(scores, (fires * torch.rand(400, 20, generator=draw)).half())]))


def _results(seed: int, layers: int = 4, decided: float | None = 0.3) -> list[LayerResult]:
    draw = torch.Generator().manual_seed(seed)
    results = []
    for layer in range(layers):
        candidates = tuple(
            Candidate("learned", "block", rank, rank * 44, _curve(draw, rank / 3), {}) for rank in (2, 5, 9, 14)
        )
        results.append(LayerResult(layer, 20, 24, 72, decided, 0.5, {}, candidates))
    return results


def _beyond(choices: Iterable[PredictorChoice], ratio: float) -> float:
    """Neurons that are computed beyond `ratio` times those that fire; 20 are in a layer."""
    points = [choice.point for choice in choices]
    return sum(
        20 * max(0.0, point.computed_share - ratio * point.computed_share / point.computed_ratio) for point in points
    )


def _best(options: list[list[PredictorChoice]], parameters: int, ratio: float) -> tuple[float, float] | None:
    found = [
        (round(_beyond(combination, ratio), 9), sum(choice.cost for choice in combination))
        for combination in itertools.product(*options)
        if sum(choice.parameters for choice in combination) <= parameters
    ]
    return min(found, default=None)


@pytest.mark.parametrize("ratio", [1.2, 3.0])
@pytest.mark.parametrize("exact", [True, False])
def test_the_choice_is_the_best_of_all(ratio: float, exact: bool) -> None:
    for _ in range(8):
        results = _results(random.randrange(1 << 30))
        targets = {layer: random.choice((0.9, 0.99)) for layer in range(4)}
        limits = ChoiceLimits(random.randrange(0, 2500), ratio, exact)
        every = [options_of(result, targets[result.layer], limits) for result in results]
        best = _best(every, limits.parameters, ratio)
        if best is None:
            with pytest.raises(UsageError, match="budget"):
                choose(results, targets, limits)
            continue
        chosen = choose(results, targets, limits)
        assert (_beyond(chosen, ratio), sum(choice.cost for choice in chosen)) == pytest.approx(best)
        assert sum(choice.parameters for choice in chosen) <= limits.parameters
        assert all(choice.point.weighted_recall >= targets[choice.layer] for choice in chosen)


def test_exact_needs_no_parameters_and_misses_nothing() -> None:
    results = _results(1)
    chosen = choose(results, dict.fromkeys(range(4), 0.999), ChoiceLimits(0, 1.5, exact=True))
    assert [(choice.kind, choice.parameters, choice.point.weighted_recall) for choice in chosen] == [
        ("exact", 0, 1.0)
    ] * 4
    # The gate in full; up and down of the neurons that it does not silence.
    assert chosen[0].cost == pytest.approx(20 * 24 + 0.3 * 20 * 48)


def test_without_exact_a_budget_can_be_too_small() -> None:
    results = _results(2)
    targets = dict.fromkeys(range(4), 0.9)
    with pytest.raises(UsageError, match="the smallest predictors have 352 parameters, more than the budget of 351"):
        choose(results, targets, ChoiceLimits(351, 1.5, exact=False))
    assert all(choice.kind == "learned" for choice in choose(results, targets, ChoiceLimits(4000, 1.5, exact=False)))


def test_where_nothing_can_be_exact_everything_can_be_computed() -> None:
    results = _results(3, decided=None)
    (choice, *_) = choose(results, dict.fromkeys(range(4), 0.9), ChoiceLimits(0, 1.5, exact=True))
    assert (choice.kind, choice.point.computed_share, choice.cost) == ("none", 1.0, 20 * 72)
    entry = layer_entry(results[0], choice)
    assert (entry.kind, entry.rank, entry.parameters, entry.weighted_recall) == ("none", None, 0, 1.0)


def test_no_predictor_that_reads_more_than_it_spares() -> None:
    draw = torch.Generator().manual_seed(4)
    # It knows nothing, so that it computes nearly all.
    blind = Candidate("learned", "block", 9, 9 * 44, _curve(draw, 0.0), {})
    sharp = Candidate("learned", "block", 14, 9 * 44, _curve(draw, 9.0), {})
    for candidates, kind in (((blind,), "none"), ((blind, sharp), "learned")):
        result = LayerResult(0, 20, 24, 72, None, 0.5, {}, candidates)
        (choice,) = choose([result], {0: 0.99}, ChoiceLimits(10**6, 1.5, exact=True))
        assert choice.kind == kind
        assert choice.cost <= 20 * 72
    # Where it is the only one, it is taken all the same.
    alone = LayerResult(0, 20, 24, 72, 0.3, 0.5, {}, (blind,))
    assert choose([alone], {0: 0.99}, ChoiceLimits(10**6, 1.5, exact=False))[0].kind == "learned"


def test_tightening_halves_what_may_be_missed() -> None:
    results = _results(5)
    first = Selection.first([0, 1, 2, 3], 0.9, ChoiceLimits(10**6, 99.0, exact=False), {})
    tighter = first.tightened([1, 3])
    assert dict(tighter.targets) == {0: 0.9, 1: pytest.approx(0.95), 2: 0.9, 3: pytest.approx(0.95)}
    assert first.changes(tighter, results)
    assert not first.changes(first.tightened([]), results)
    recalls = [choice.point.weighted_recall for choice in tighter.choices(results)]
    assert recalls[1] >= 0.95 and recalls[3] >= 0.95
