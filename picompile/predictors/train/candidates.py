"""The training job of one layer: a pure function of its data and settings, which returns candidate predictors."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from picompile.errors import UsageError
from picompile.frontend.tensor_file import opened
from picompile.predictors.profile.files import write_tensors
from picompile.predictors.train.data import (
    ROWS,
    FiringLabels,
    LayerData,
    RecallCurve,
    load_layer_data,
    measure_curve,
    measure_firing,
)
from picompile.predictors.train.fit import InitialPredictor, JobSettings, ReducedRankStart, fit
from picompile.predictors.train.options import round_rank, start_rank
from picompile.products import fast_products

# The share of the samples to train on. They are split in order, so that neighbours in the text stay on one side.
_TRAIN_SHARE = 0.8

# The ranks to train, relative to the start rank; more small ones, because those decide when the budget is tight.
_RANK_FACTORS = (0.35, 0.45, 0.6, 0.75, 1.0, 1.25)

# Another input is chosen only if its cost is below this share of the block's: costs are measured on the samples that
# also make the choice.
_WORTH_CHANGING = 0.98


@dataclass(frozen=True)
class Candidate:
    """A predictor to choose from: its kind, and its input and rank if it is learned.

    `parameters` counts its own weights. `weights` are fc1, fc2 and bias in float16, empty if they were not read.
    """

    kind: str
    input: str | None
    rank: int | None
    parameters: int
    curve: RecallCurve
    weights: Mapping[str, Tensor]

    def read(self, hidden: int, chosen_share: float) -> float:
        """Return how many weights of its own it reads for a token: fc1, and of fc2 and bias those of chosen experts."""
        first = (self.rank or 0) * hidden
        return first + (self.parameters - first) * chosen_share


@dataclass(frozen=True)
class LayerResult:
    """The candidates of a layer, those of small rank first, and the facts about the layer that the choice needs.

    `decided_share` is the share of neurons that an exact predictor computes, None if there cannot be one. `inputs` are
    the costs by which the input was chosen, empty if no inputs were compared. `chosen_share` is the share of the
    `neurons` that the experts of a token have, 1 without experts: other shares are of those.
    """

    layer: int
    neurons: int
    hidden: int
    neuron_parameters: int
    decided_share: float | None
    skewness: float
    inputs: Mapping[str, float]
    candidates: tuple[Candidate, ...]
    chosen_share: float = 1.0

    @property
    def token_neurons(self) -> float:
        """The neurons that a token can compute, on the average."""
        return self.neurons * self.chosen_share


@fast_products()
def fit_layer(data: LayerData, settings: JobSettings) -> LayerResult:
    """Train the candidates of one layer. The same arguments give the same bytes on one kind of machine."""
    train, test = split(len(data.samples))
    firing = measure_firing(data, test)
    candidates: tuple[Candidate, ...] = (_sign_candidate(data, firing, test),) if settings.kind == "sign" else ()
    inputs: dict[str, float] = {}
    if not candidates:
        candidates, inputs = _learned_candidates(data, firing, train, test, settings)
    decided = firing.decided_share if data.silent_at is not None else None
    sizes = (data.neurons, data.hidden, data.neuron_parameters)
    return LayerResult(data.layer, *sizes, decided, settings.skewness, inputs, candidates, data.chosen_share)


def split(samples: int) -> tuple[slice, slice]:
    """Return the samples to train on and the samples to measure on; a single sample serves as both."""
    cut = min(max(1, round(samples * _TRAIN_SHARE)), max(1, samples - 1))
    return slice(0, cut), slice(cut if samples > 1 else 0, samples)


def _learned_candidates(
    data: LayerData, firing: FiringLabels, train: slice, test: slice, settings: JobSettings
) -> tuple[tuple[Candidate, ...], dict[str, float]]:
    ranks = _ranks(data, firing, settings)
    starts: dict[str, ReducedRankStart] = {}

    def candidate(name: str, rank: int, settings: JobSettings) -> Candidate:
        if name not in starts:
            starts[name] = ReducedRankStart(data, firing.contribution, name, train)
        start = starts[name].of_rank(rank)
        trained = fit(data, firing.contribution, name, start, how=settings, train=train)
        # With few samples, training can end worse than it started.
        found = [
            _measured_candidate(data, firing, name, rank, weights=each.rounded(), test=test)
            for each in (trained, start)
        ]
        return min(found, key=lambda each: each.curve.at(settings.recall).computed_share)

    name = settings.input
    inputs: dict[str, float] = {}
    if name == "auto":
        shorter = replace(settings, epochs=1)
        rank = ranks[len(ranks) // 2]
        for choice in data.input_choices:
            inputs[choice] = _read_weights(data, candidate(choice, rank, shorter), settings.recall)
            if choice != "block" and inputs[choice] > inputs["block"]:
                del starts[choice]
        best = min(inputs, key=lambda choice: inputs[choice])
        name = best if inputs[best] < _WORTH_CHANGING * inputs["block"] else "block"
    elif name not in data.input_choices:
        # The first layer has no previous one, and some blocks have no norm: they read the block's input.
        name = "block"
    return tuple(candidate(name, rank, settings) for rank in ranks), inputs


def _ranks(data: LayerData, firing: FiringLabels, settings: JobSettings) -> list[int]:
    most = min(data.hidden, data.neurons)
    if settings.rank is not None:
        return [min(settings.rank, most)]
    share = float(sum(int((block > 0).sum()) for block in torch.split(firing.contribution, ROWS)))
    share /= max(1.0, firing.contribution.numel() * data.chosen_share)
    start = start_rank(data.hidden, data.neurons, share, settings.skewness)
    return sorted({round_rank(start * factor, most) for factor in _RANK_FACTORS})


def _read_weights(data: LayerData, candidate: Candidate, recall: float) -> float:
    """Return how many weights are read per token."""
    computed, share = candidate.curve.at(recall).computed_share, data.chosen_share
    return candidate.read(data.hidden, share) + computed * data.neurons * share * data.neuron_parameters


def _measured_candidate(
    data: LayerData, firing: FiringLabels, name: str, rank: int, weights: InitialPredictor, test: slice
) -> Candidate:
    def blocks() -> Iterator[tuple[Tensor, ...]]:
        for start in range(test.start, test.stop, ROWS):
            rows = slice(start, min(start + ROWS, test.stop))
            yield data.of_candidates(rows, weights.scores(data.inputs(name, rows)), firing.contribution[rows])

    parts = {"fc1": weights.fc1, "fc2": weights.fc2, "bias": weights.bias}
    count = sum(part.numel() for part in parts.values())
    stored = {key: part.half() for key, part in parts.items()}
    return Candidate("learned", input=name, rank=rank, parameters=count, curve=measure_curve(blocks()), weights=stored)


# Spreads the shares of agreeing signs, which all lie around a half, over the bins of a curve.
SIGN_SCALE = 64.0


def _sign_candidate(data: LayerData, firing: FiringLabels, test: slice) -> Candidate:
    signs = torch.where(data.gating[0] < 0, -1.0, 1.0)

    def blocks() -> Iterator[tuple[Tensor, ...]]:
        for start in range(test.start, test.stop, ROWS):
            rows = slice(start, min(start + ROWS, test.stop))
            x = torch.where(data.samples.block(rows) < 0, -1.0, 1.0)
            # Agreeing minus differing columns is twice the share's distance from a half, times the columns.
            scores = x @ signs.T * (SIGN_SCALE / 2 / data.hidden)
            yield data.of_candidates(rows, scores, firing.contribution[rows])

    return Candidate("sign", input=None, rank=None, parameters=0, curve=measure_curve(blocks()), weights={})


# A layer's result is one file, which appears whole or not at all.

_FACTS = ("layer", "neurons", "hidden", "neuron_parameters", "decided_share", "skewness", "inputs", "chosen_share")
_CANDIDATE_FACTS = ("kind", "input", "rank", "parameters")
_DAMAGED = "damaged; remove it, and train goes on"


def save_result(path: Path, result: LayerResult) -> None:
    """Write a result to `path`."""
    tensors: dict[str, Tensor] = {}
    for number, candidate in enumerate(result.candidates):
        tensors |= {f"{number}.curve.{name}": tensor for name, tensor in candidate.curve.tensors().items()}
        tensors |= {f"{number}.{name}": tensor for name, tensor in candidate.weights.items()}
    facts = {name: getattr(result, name) for name in _FACTS}
    candidates = [{name: getattr(candidate, name) for name in _CANDIDATE_FACTS} for candidate in result.candidates]
    write_tensors(path, tensors, {"facts": json.dumps(facts), "candidates": json.dumps(candidates)})


def load_result(path: Path) -> LayerResult:
    """Read a result without the candidates' weights. Raise `UsageError` if the file is damaged."""
    with opened(path, _DAMAGED, UsageError) as file:
        metadata, names = file.metadata(), [name for name in file.keys() if ".curve." in name]  # noqa: SIM118
        tensors = {name: file.get_tensor(name).clone() for name in names}
        candidates = [
            Candidate(**facts, curve=_curve(tensors, number), weights={})
            for number, facts in enumerate(json.loads(metadata["candidates"]))
        ]
        return LayerResult(**json.loads(metadata["facts"]), candidates=tuple(candidates))


def load_weight(path: Path, number: int, part: str) -> Tensor:
    """Return a part of candidate `number`, mapped from the file. Raise `UsageError` if it is damaged."""
    with opened(path, _DAMAGED, UsageError) as file:
        tensor: Tensor = file.get_tensor(f"{number}.{part}")
    return tensor


def _curve(tensors: dict[str, Any], number: int) -> RecallCurve:
    names = ("computed", "fired", "found", "total")
    return RecallCurve.of_tensors({name: tensors[f"{number}.curve.{name}"] for name in names})


def run_job(data: Path, result: Path, settings: JobSettings) -> None:
    """Train the layer whose data are in the file `data`, and write the file `result`.

    It runs on one thread, because sums depend on the number of threads.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        save_result(result, fit_layer(load_layer_data(data), settings))
    finally:
        torch.set_num_threads(threads)
