"""The job of one layer: data, labels, start, descent, candidates."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from helpers.layers import random_layer
from picompile.predictors.firing import FiringRule
from picompile.predictors.train.candidates import (
    JobSettings,
    LayerResult,
    fit_layer,
    load_result,
    load_weights,
    save_result,
    split,
)
from picompile.predictors.train.data import (
    LayerData,
    RecallCurve,
    load_layer_data,
    measure_curve,
    measure_firing,
    save_layer_data,
)
from picompile.predictors.train.fit import FitSettings, InitialPredictor, ReducedRankStart, fit
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
# A norm across neurons changes what a neuron contributes, and not whether it fires.
NORMED = {
    "normed": {"activation": "relu2", "norm_eps": 1e-5},
    "normed by contribution": {"activation": "silu", "norm_eps": 1e-5, "threshold": 9.0, "by": "contribution"},
}


def _curve(data: LayerData, weights: InitialPredictor, name: str = "block") -> RecallCurve:
    _, test = split(len(data.samples))
    contribution = measure_firing(data, test).contribution
    return measure_curve(iter([(weights.scores(data.inputs(name, test)), contribution[test])]))


@pytest.mark.parametrize("shape", [*SHAPES, *NORMED])
def test_labels_are_what_the_block_computes(shape: str) -> None:
    data = random_layer(random.randrange(1 << 30), samples=1100, **(SHAPES | NORMED)[shape])
    _, test = split(len(data.samples))
    firing = measure_firing(data, test)
    hidden = data.outputs(data.samples.block(slice(None))).abs()
    normed = hidden if data.norm_eps is None else hidden / (hidden.square().mean(1, keepdim=True) + 1e-5).sqrt()
    lengths = data.down.norm(dim=1)
    compared = hidden * lengths if data.rule.by == "contribution" else hidden
    expected = torch.where(compared > data.rule.threshold, normed * lengths, 0.0)
    assert torch.equal(firing.contribution > 0, expected > 0)
    assert 0.01 < float((expected > 0).float().mean()) < 0.9
    scale = float(expected.sum() / firing.contribution.float().sum())
    big = expected > 0.01 * expected.mean()
    torch.testing.assert_close(firing.contribution.float()[big] * scale, expected[big], rtol=3e-3, atol=0.0)
    if data.one_sided:
        assert firing.decided_share == pytest.approx(float((expected[test] > 0).float().mean()), abs=2e-3)


@pytest.mark.parametrize("shape", ["reglu", "bias", "opt", "no-norm", "fatrelu", "relu2"])
def test_a_start_of_full_rank_knows_everything(shape: str) -> None:
    data = random_layer(random.randrange(1 << 30), samples=900, **SHAPES[shape])
    train, test = split(len(data.samples))
    contribution = measure_firing(data, test).contribution
    full = ReducedRankStart(data, contribution, "block", train).of_rank(data.hidden)
    point = _curve(data, full).at(0.999)
    assert point.computed_ratio < 1.02


@pytest.mark.parametrize("shape", SHAPES)
def test_training_mends_a_bad_start(shape: str) -> None:
    data = random_layer(random.randrange(1 << 30), samples=2500, **SHAPES[shape])
    train, test = split(len(data.samples))
    contribution = measure_firing(data, test).contribution
    start = ReducedRankStart(data, contribution, "block", train).of_rank(12)
    spoilt = dataclasses.replace(start, fc2=start.fc2 + torch.randn(start.fc2.shape) * start.fc2.std())
    trained = fit(data, contribution, "block", spoilt, FitSettings(8, "contribution", 0.97, 0, train))
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
            weights = fit(data, contribution, "block", start, FitSettings(12, weighting, 0.95, 0, train))
            ratios[weighting] += _curve(data, weights).at(0.95).computed_ratio
    assert ratios["contribution"] < 0.95 * ratios["none"]


def test_a_candidate_is_never_behind_its_start() -> None:
    data = random_layer(random.randrange(1 << 30), samples=150)
    train, test = split(len(data.samples))
    start = ReducedRankStart(data, measure_firing(data, test).contribution, "block", train)
    for candidate in fit_layer(data, dataclasses.replace(SETTINGS, epochs=30)).candidates:
        untrained = _curve(data, start.of_rank(candidate.rank or 0).rounded())
        assert candidate.curve.at(0.99).computed_share <= untrained.at(0.99).computed_share


@pytest.mark.parametrize("name", ["block", "stream", "previous"])
def test_every_input_can_be_learned_from(name: str) -> None:
    data = random_layer(random.randrange(1 << 30), samples=1500, previous=True)
    result = fit_layer(data, dataclasses.replace(SETTINGS, input=name, rank=20))
    (candidate,) = result.candidates
    assert (candidate.input, candidate.rank) == (name, 20)
    assert candidate.curve.at(0.95).computed_share < 0.85


def test_auto_takes_the_input_that_costs_least() -> None:
    data = random_layer(random.randrange(1 << 30), samples=1500, previous=True)
    result = fit_layer(data, dataclasses.replace(SETTINGS, input="auto"))
    assert set(result.inputs) == {"block", "stream", "previous"}
    # Noise was added to what the layer before read.
    assert result.inputs["previous"] > result.inputs["block"]
    best = min(result.inputs.values())
    assert result.inputs[str(result.candidates[0].input)] <= best / 0.98


def test_an_input_that_there_is_not_becomes_the_block() -> None:
    data = random_layer(1, norm=None)
    for name in ("stream", "previous"):
        result = fit_layer(data, dataclasses.replace(SETTINGS, input=name, rank=8))
        assert result.candidates[0].input == "block"


def test_the_job_is_a_pure_function() -> None:
    data = random_layer(5)
    first, second = (fit_layer(data, SETTINGS) for _ in range(2))
    for mine, same in zip(first.candidates, second.candidates, strict=True):
        assert all(torch.equal(mine.weights[part], same.weights[part]) for part in mine.weights)
        assert torch.equal(mine.curve.contribution, same.curve.contribution)


def test_the_seed_orders_the_samples() -> None:
    data = random_layer(5)
    train, test = split(len(data.samples))
    contribution = measure_firing(data, test).contribution
    start = ReducedRankStart(data, contribution, "block", train).of_rank(8)
    same, again, other = (
        fit(data, contribution, "block", start, FitSettings(1, "contribution", 0.99, seed, train)) for seed in (0, 0, 1)
    )
    assert torch.equal(same.fc2, again.fc2)
    assert not torch.equal(same.fc2, other.fc2)


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


@pytest.mark.parametrize("samples", [1, 2, 3, 20])
def test_few_samples_are_enough_to_end_well(samples: int) -> None:
    result = fit_layer(random_layer(2, samples=samples, previous=True), dataclasses.replace(SETTINGS, input="auto"))
    for candidate in result.candidates:
        assert all(bool(part.isfinite().all()) for part in candidate.weights.values())


@pytest.mark.parametrize("shape", [*SHAPES, *NORMED])
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
    assert _facts(read) == _facts(result)
    for number, (mine, other) in enumerate(zip(result.candidates, read.candidates, strict=True)):
        weights = load_weights(tmp_path / "003.safetensors", number)
        assert all(torch.equal(weights[part], mine.weights[part]) for part in ("fc1", "fc2", "bias"))
        assert mine.parameters == sum(part.numel() for part in weights.values())
        for target in (0.5, 0.99, 0.999):
            assert vars(mine.curve.at(target)) == pytest.approx(vars(other.curve.at(target)))


def _facts(result: LayerResult) -> object:
    return {name: value for name, value in vars(result).items() if name != "candidates"}


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
