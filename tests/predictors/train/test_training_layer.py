"""The job of one layer: data, labels, start, descent, candidates; and the choice over all layers, the best there is."""

import dataclasses
import itertools
import random
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from helpers.layers import random_layer
from picompile.errors import UsageError
from picompile.predictors.firing import FiringRule
from picompile.predictors.train.candidates import (
    Candidate,
    LayerResult,
    fit_layer,
    load_result,
    load_weight,
    save_result,
    split,
)
from picompile.predictors.train.choose import ChoiceLimits, PredictorChoice, choose, layer_entry, options_of
from picompile.predictors.train.data import (
    LayerData,
    RecallCurve,
    load_layer_data,
    measure_curve,
    measure_firing,
    save_layer_data,
)
from picompile.predictors.train.fit import InitialPredictor, JobSettings, ReducedRankStart, fit
from picompile.predictors.train.options import round_rank, start_rank

SETTINGS = JobSettings("learned", "block", None, "contribution", 2, 0.99, 0, "cpu", 0.4)
SHAPES = {
    "reglu": {},
    "bias": {"biased": True, "norm": "layer_norm"},
    "opt": {"gated": False, "biased": True, "norm": "layer_norm"},
    "no-norm": {"gated": False, "norm": None},
    "fatrelu": {"activation": "fatrelu(0.5)"},
    "relu2": {"gated": False, "activation": "relu2"},
    "drelu": {"up_activation": "relu"},
    "silu": {"activation": "silu", "threshold": 1.5},
    "gelu": {"gated": False, "activation": "gelu", "threshold": 0.6},
    "silu by contribution": {"activation": "silu", "threshold": 9.0, "by": "contribution"},
}
# A token chooses two experts, and none of the neurons of the others is one to predict.
OF_EXPERTS = {
    "experts": {"experts": 7},
    "drelu of experts": {"experts": 7, "up_activation": "relu"},
    "relu2 of experts": {"experts": 13, "gated": False, "activation": "relu2", "norm": None},
}
# A norm across neurons changes what a neuron contributes, and not whether it fires.
NORMED = {
    "normed": {"activation": "relu2", "norm_eps": 1e-5},
    "normed by contribution": {"activation": "silu", "norm_eps": 1e-5, "threshold": 9.0, "by": "contribution"},
}


def _curve(data: LayerData, weights: InitialPredictor, name: str = "block") -> RecallCurve:
    _, test = split(len(data.samples))
    contribution = measure_firing(data, test).contribution
    scores = weights.scores(data.inputs(name, test))
    return measure_curve(iter([data.of_candidates(test, scores, contribution[test])]))


@pytest.mark.parametrize("shape", [*SHAPES, *NORMED, *OF_EXPERTS])
def test_labels_are_what_the_block_computes(shape: str) -> None:
    data = random_layer(random.randrange(1 << 30), samples=1100, **(SHAPES | NORMED | OF_EXPERTS)[shape])
    _, test = split(len(data.samples))
    firing = measure_firing(data, test)
    hidden = data.outputs(data.samples.block(slice(None))).abs()
    normed = hidden if data.norm_eps is None else hidden / (hidden.square().mean(1, keepdim=True) + 1e-5).sqrt()
    lengths = data.down.norm(dim=1)
    compared = hidden * lengths if data.rule.by == "contribution" else hidden
    expected = torch.where(compared > data.rule.threshold, normed * lengths, 0.0)
    if data.gains is not None:
        expected *= data.gains.float().repeat_interleave(data.neurons // data.gains.shape[1], dim=1)
    assert torch.equal(firing.contribution > 0, expected > 0)
    assert 0.01 < float((expected > 0).float().mean()) < 0.9
    scale = float(expected.sum() / firing.contribution.float().sum())
    big = expected > 0.01 * expected.mean()
    torch.testing.assert_close(firing.contribution.float()[big] * scale, expected[big], rtol=3e-3, atol=0.0)
    if data.one_sided:
        (decided,) = data.of_candidates(test, expected[test] > 0)
        assert firing.decided_share == pytest.approx(float(decided.float().mean()), abs=2e-3)


@pytest.mark.parametrize("shape", ["bias", "no-norm", "fatrelu", "experts", "relu2 of experts"])
def test_a_start_of_full_rank_knows_everything(shape: str) -> None:
    data = random_layer(random.randrange(1 << 30), samples=900, **(SHAPES | OF_EXPERTS)[shape])
    train, test = split(len(data.samples))
    contribution = measure_firing(data, test).contribution
    full = ReducedRankStart(data, contribution, "block", train).of_rank(data.hidden)
    point = _curve(data, full).at(0.999)
    assert point.computed_ratio < 1.02


@pytest.mark.parametrize("shape", ["reglu", "opt", "drelu", "silu by contribution", *OF_EXPERTS])
def test_training_mends_a_bad_start(shape: str) -> None:
    data = random_layer(random.randrange(1 << 30), samples=2500, **(SHAPES | OF_EXPERTS)[shape])
    train, test = split(len(data.samples))
    contribution = measure_firing(data, test).contribution
    start = ReducedRankStart(data, contribution, "block", train).of_rank(12)
    spoilt = dataclasses.replace(start, fc2=start.fc2 + torch.randn(start.fc2.shape) * start.fc2.std())
    trained = fit(data, contribution, "block", spoilt, dataclasses.replace(SETTINGS, epochs=8, recall=0.97), train)
    before, after, good = (_curve(data, weights).at(0.97).computed_ratio for weights in (spoilt, trained, start))
    assert after < before - 0.5 * (before - good)


def test_contribution_counts_where_it_is_asked_to() -> None:
    ratios = {"contribution": 0.0, "none": 0.0}
    for _ in range(3):
        data = random_layer(random.randrange(1 << 30), samples=5000, hidden=24, spread=1.0)
        # Every third neuron contributes most of what there is.
        data.down[::3] *= 30
        train, test = split(len(data.samples))
        contribution = measure_firing(data, test).contribution
        start = ReducedRankStart(data, contribution, "block", train).of_rank(6)
        for weighting in ratios:
            how = dataclasses.replace(SETTINGS, weighting=weighting, epochs=12, recall=0.95)
            weights = fit(data, contribution, "block", start, how, train)
            ratios[weighting] += _curve(data, weights).at(0.95).computed_ratio
    assert ratios["contribution"] < 0.95 * ratios["none"]


def test_a_candidate_is_never_behind_its_start() -> None:
    data = random_layer(random.randrange(1 << 30), samples=150)
    train, test = split(len(data.samples))
    start = ReducedRankStart(data, measure_firing(data, test).contribution, "block", train)
    for candidate in fit_layer(data, dataclasses.replace(SETTINGS, epochs=30)).candidates:
        untrained = _curve(data, start.of_rank(candidate.rank or 0).rounded())
        assert candidate.curve.at(0.99).computed_share <= untrained.at(0.99).computed_share


@pytest.mark.parametrize("shape", ["reglu", "drelu"])
def test_one_expert_that_all_choose_is_a_block(shape: str) -> None:
    data, how = random_layer(random.randrange(1 << 30), **SHAPES[shape]), dataclasses.replace(SETTINGS, rank=8)
    chosen = dataclasses.replace(data, gains=torch.ones(len(data.samples), 1).half())
    plain, of_experts = (fit_layer(each, how) for each in (data, chosen))
    for part, tensor in plain.candidates[0].weights.items():
        assert torch.equal(tensor, of_experts.candidates[0].weights[part])
    assert (plain.decided_share, 1.0) == (of_experts.decided_share, of_experts.chosen_share)
    assert vars(plain.candidates[0].curve.at(0.9)) == vars(of_experts.candidates[0].curve.at(0.9))


def test_neurons_of_an_expert_learn_from_its_tokens_alone() -> None:
    """Two experts, each chosen by a half of the samples: labels of the other half are turned, and change nothing."""
    data = random_layer(random.randrange(1 << 30), neurons=80)
    gains = torch.zeros(len(data.samples), 2).half()
    gains[torch.arange(len(gains)), torch.randint(2, (len(gains),))] = 1
    data, (train, test) = dataclasses.replace(data, gains=gains), split(len(data.samples))
    contribution = measure_firing(data, test).contribution
    candidates = data.candidates(slice(None))
    assert candidates is not None and not contribution[~candidates].any()
    start = ReducedRankStart(data, contribution, "block", train).of_rank(8)
    turned = torch.where(candidates, contribution, torch.ones_like(contribution))
    # With this weighting labels have no mean that they are relative to.
    how = dataclasses.replace(SETTINGS, weighting="none")
    trained, same = (fit(data, labels, "block", start, how, train) for labels in (contribution, turned))
    assert torch.equal(trained.fc2, same.fc2) and torch.equal(trained.bias, same.bias)
    assert not torch.equal(trained.fc2, start.fc2)
    assert _curve(data, trained).total == int(candidates[test].sum())


@pytest.mark.parametrize("name", ["block", "stream", "previous"])
def test_every_input_can_be_learned_from(name: str) -> None:
    data = random_layer(random.randrange(1 << 30), samples=1500, previous=True)
    result = fit_layer(data, dataclasses.replace(SETTINGS, input=name, rank=20))
    (candidate,) = result.candidates
    assert (candidate.input, candidate.rank) == (name, 20)
    assert candidate.curve.at(0.95).computed_share < 0.85
    # An input that there is not becomes the block's.
    without = fit_layer(random_layer(1, norm=None), dataclasses.replace(SETTINGS, input=name, rank=8))
    assert without.candidates[0].input == "block"


def test_auto_takes_the_input_that_costs_least() -> None:
    data = random_layer(random.randrange(1 << 30), samples=1500, previous=True)
    result = fit_layer(data, dataclasses.replace(SETTINGS, input="auto"))
    assert set(result.inputs) == {"block", "stream", "previous"}
    # Noise was added to what the layer before read.
    assert result.inputs["previous"] > result.inputs["block"]
    best = min(result.inputs.values())
    assert result.inputs[str(result.candidates[0].input)] <= best / 0.98


def test_signs_need_no_training() -> None:
    data = random_layer(random.randrange(1 << 30), spread=1.0)
    (candidate,) = fit_layer(data, dataclasses.replace(SETTINGS, kind="sign")).candidates
    assert (candidate.kind, candidate.parameters, dict(candidate.weights)) == ("sign", 0, {})
    _, test = split(len(data.samples))
    x, matrix = data.samples.block(test), data.gating[0]
    share = ((x < 0)[:, None] == (matrix < 0)[None]).float().mean(-1)
    point = candidate.curve.at(0.95)
    limit = 0.5 + point.threshold / 64
    computed = share > limit
    contribution = measure_firing(data, test).contribution[test].float()
    assert float(computed.float().mean()) == pytest.approx(point.computed_share)
    assert float((contribution * computed).sum() / contribution.sum()) == pytest.approx(point.weighted_recall, abs=1e-3)


def test_a_layer_that_never_fires_computes_nothing() -> None:
    data = dataclasses.replace(random_layer(3), rule=FiringRule(1e9))
    for candidate in fit_layer(data, SETTINGS).candidates:
        point = candidate.curve.at(0.995)
        assert (point.computed_share, point.weighted_recall, point.recall) == (0.0, 1.0, 1.0)
        assert all(bool(part.isfinite().all()) for part in candidate.weights.values())


@pytest.mark.parametrize("samples", [1, 3])
def test_few_samples_are_enough_to_end_well(samples: int) -> None:
    result = fit_layer(random_layer(2, samples=samples, previous=True), dataclasses.replace(SETTINGS, input="auto"))
    for candidate in result.candidates:
        assert all(bool(part.isfinite().all()) for part in candidate.weights.values())


@pytest.mark.parametrize("shape", ["bias", "no-norm", "normed by contribution"])
def test_data_travel_through_a_file(tmp_path: Path, shape: str) -> None:
    data = random_layer(random.randrange(1 << 30), samples=50, previous=True, **(SHAPES | NORMED)[shape])
    save_layer_data(tmp_path / "x.data", data)
    read = load_layer_data(tmp_path / "x.data")
    rows = slice(0, 50)
    for name in ("layer", "rule", "activation", "norm_eps"):
        assert getattr(read, name) == getattr(data, name)
    assert torch.equal(read.outputs(read.samples.block(rows)), data.outputs(data.samples.block(rows)))
    assert all(torch.equal(read.inputs(name, rows), data.inputs(name, rows)) for name in data.input_choices)
    assert read.input_choices == data.input_choices


def test_results_travel_through_a_file(tmp_path: Path) -> None:
    result = fit_layer(random_layer(4), SETTINGS)
    save_result(tmp_path / "003.safetensors", result)
    read = load_result(tmp_path / "003.safetensors")
    assert dataclasses.replace(read, candidates=()) == dataclasses.replace(result, candidates=())
    for number, (mine, other) in enumerate(zip(result.candidates, read.candidates, strict=True)):
        weights = {part: load_weight(tmp_path / "003.safetensors", number, part) for part in ("fc1", "fc2", "bias")}
        assert all(torch.equal(weights[part], mine.weights[part]) for part in weights)
        assert mine.parameters == sum(part.numel() for part in weights.values())
        for target in (0.5, 0.99, 0.999):
            assert vars(mine.curve.at(target)) == pytest.approx(vars(other.curve.at(target)))


def test_a_curve_is_what_sorting_finds() -> None:
    draw = torch.Generator().manual_seed(random.randrange(1 << 30))
    scores = torch.randn(2000, 13, generator=draw) * 9
    contribution = (
        torch.rand(2000, 13, generator=draw) * (scores + torch.randn(2000, 13, generator=draw) * 9 > 8)
    ).half()
    curve = measure_curve((scores[rows], contribution[rows]) for rows in torch.arange(2000).split(300))
    for target in (0.2, 0.9, 0.99, 1.0):
        point = curve.at(target)
        fires = contribution > 0
        whole = float(contribution.double().sum())
        # float32 rounds a score on the edge of a bin into the one or the other: the point is between these two.
        edge = 1e-5 * (1 + abs(point.threshold))
        fewer, more = scores > point.threshold + edge, scores > point.threshold - edge
        for computed, others in ((fewer, more), (more, fewer)):
            sign = 1 if computed is more else -1
            found = float((contribution.double() * computed).sum()) / whole
            assert sign * (found - point.weighted_recall) >= -1e-6
            assert sign * (int((computed & fires).sum()) / int(fires.sum()) - point.recall) >= -1e-6
            assert sign * (int(computed.sum()) / int(fires.sum()) - point.computed_ratio) >= -1e-6
            assert sign * (int((computed & fires).sum()) / int(others.sum()) - point.precision) >= -1e-6
        assert point.weighted_recall >= target - 1e-6
        # No threshold that is higher by more than a bin would do.
        higher = scores > point.threshold + 0.1
        assert float((contribution.double() * higher).sum()) / whole < target + 1e-9


def test_ranks_are_whole_blocks_and_grow_with_what_fires() -> None:
    assert [round_rank(rank, 4096) for rank in (0.2, 3.9, 13.0, 300.0, 5000.0)] == [8, 8, 16, 288, 4096]
    assert round_rank(50, 37) == 37
    assert start_rank(192, 704, 0.3, 0.4) > start_rank(192, 704, 0.03, 0.4) > start_rank(192, 704, 0.03, 0.9)


def _drawn_curve(draw: torch.Generator, sharpness: float) -> RecallCurve:
    scores = torch.randn(400, 20, generator=draw)
    fires = scores * sharpness + torch.randn(400, 20, generator=draw) > 1.0
    return measure_curve(iter([(scores, (fires * torch.rand(400, 20, generator=draw)).half())]))


def _results(seed: int, layers: int = 4, decided: float | None = 0.3) -> list[LayerResult]:
    draw = torch.Generator().manual_seed(seed)
    results = []
    for layer in range(layers):
        candidates = tuple(
            Candidate("learned", "block", rank, rank * 44, _drawn_curve(draw, rank / 3), {}) for rank in (2, 5, 9, 14)
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


def test_where_nothing_can_be_exact_everything_can_be_computed() -> None:
    results = _results(3, decided=None)
    (choice, *_) = choose(results, dict.fromkeys(range(4), 0.9), ChoiceLimits(0, 1.5, exact=True))
    assert (choice.kind, choice.point.computed_share, choice.cost) == ("none", 1.0, 20 * 72)
    entry = layer_entry(results[0], choice)
    assert (entry.kind, entry.rank, entry.parameters, entry.weighted_recall) == ("none", None, 0, 1.0)


def test_no_predictor_that_reads_more_than_it_spares() -> None:
    draw = torch.Generator().manual_seed(4)
    # It knows nothing, so that it computes nearly all.
    blind = Candidate("learned", "block", 9, 9 * 44, _drawn_curve(draw, 0.0), {})
    sharp = Candidate("learned", "block", 14, 9 * 44, _drawn_curve(draw, 9.0), {})
    for candidates, kind in (((blind,), "none"), ((blind, sharp), "learned")):
        result = LayerResult(0, 20, 24, 72, None, 0.5, {}, candidates)
        (choice,) = choose([result], {0: 0.99}, ChoiceLimits(10**6, 1.5, exact=True))
        assert choice.kind == kind
        assert choice.cost <= 20 * 72
    # Where it is the only one, it is taken all the same.
    alone = LayerResult(0, 20, 24, 72, 0.3, 0.5, {}, (blind,))
    assert choose([alone], {0: 0.99}, ChoiceLimits(10**6, 1.5, exact=False))[0].kind == "learned"
