"""Training: from a profile to predictors that keep the perplexity within the accuracy bound, and their check."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from picompile.errors import AccuracyError, UsageError
from picompile.frontend.captured import Captured
from picompile.frontend.checkpoint import fingerprint
from picompile.frontend.hf import load_model
from picompile.output import OutputPath, reserve
from picompile.predictors.accuracy import LayerAccuracy, first_windows, measure_layers, rank_layers_by_error
from picompile.predictors.files import load_predictors
from picompile.predictors.firing import FiringRule
from picompile.predictors.profile.collect import check_experts_fire
from picompile.predictors.profile.profile import Profile
from picompile.predictors.store import BlockShape, Predictors, block_shapes
from picompile.predictors.train.candidates import LayerResult, load_result
from picompile.predictors.train.choose import ChoiceLimits, Selection, assemble, choice_key
from picompile.predictors.train.data import LayerData, find_blocks, layer_data, reads_norm
from picompile.predictors.train.directory import TrainingDirectory, digest
from picompile.predictors.train.fit import JobSettings
from picompile.predictors.train.options import TrainOptions
from picompile.predictors.train.workers import count_jobs, train_locally
from picompile.products import fast_products, require_bf16
from picompile.progress import NoProgress, Progress
from picompile.streaming import streamed_perplexity
from picompile_passes.graph.materialize import WeightSource
from picompile_passes.graph.operands import expert_count
from picompile_passes.passes.canonicalize import canonicalize
from picompile_runtime.version import __version__

# Held-out tokens that layers are ranked by error on.
_RANKING_TOKENS = 2048


@dataclass
class AccuracyCheck:
    """Measures perplexity with and without predictors: of the canonical `graph_module`, on held-out `windows`.

    `rules` says which neurons of each layer fire. `known` holds the perplexities measured so far, by `choice_key`.
    """

    graph_module: GraphModule
    weights: WeightSource
    windows: Sequence[Sequence[int]]
    rules: Mapping[int, FiringRule]
    progress: Progress
    known: dict[str, float] = field(default_factory=dict)

    def dense(self) -> float:
        """Return the perplexity of the model without predictors."""
        return self._measured("dense", self.graph_module, self.weights)

    def predicted(self, key: str, predictors: Predictors) -> float:
        """Return the perplexity with `predictors`, whose choice has the key `key`."""
        graph_module = predictors.insert_pass()(self.graph_module).graph_module
        return self._measured(key, graph_module, predictors.weights(self.weights))

    def _measured(self, key: str, graph_module: GraphModule, weights: WeightSource) -> float:
        if key not in self.known:
            self.known[key] = streamed_perplexity(graph_module, weights, self.windows, self.progress)
        return self.known[key]

    def layers(self, predictors: Predictors) -> list[LayerAccuracy]:
        """Measure each layer's predictor, with predictors in the layers before it too."""
        graph_module = predictors.insert_pass()(self.graph_module).graph_module
        windows = first_windows(self.windows, _RANKING_TOKENS)
        weights = predictors.weights(self.weights)
        return measure_layers(graph_module, weights, windows, self.rules, self.progress)


def layer_figures(layer: LayerAccuracy) -> dict[str, Any]:
    """Return a layer's figures as `predictors.json` has them."""
    return {name: value for name, value in vars(layer).items() if name not in ("kind", "rank")}


# Training: from a profile to predictors that keep the perplexity within the accuracy bound.


# A layer's skewness is the share of its firings that this share of its neurons makes.
_MOST_ACTIVE = 0.2


@fast_products()
def train_predictors(
    model: Path, profile: Profile, output: Path, options: TrainOptions | None = None, progress: Progress | None = None
) -> Predictors:
    """Train predictors of the checkpoint `model` on `profile`, write them to the folder `output`, and return them.

    If `output` holds complete predictors of the same inputs, these are read. Interrupted training is resumed and ends
    with the same bytes. Candidates are kept in `output/work`, so that another budget, accuracy bound or recall needs no
    new training.

    Raises:
        UsageError: The profile is of another model, `output` must not be overwritten, or the processor has no bfloat16.
        AccuracyError: The accuracy bound cannot be met; the error names the layers, and no predictors are written.
    """
    options, progress = options or TrainOptions(), progress or NoProgress()
    mark = fingerprint(model, options.activation)
    profile.require_model(mark)
    directory = TrainingDirectory(output)
    run = _TrainingRun(model, profile, options, progress, directory, mark)
    if options.bf16:
        run.require_bf16()

    def check() -> None:
        directory.check(run.inputs, overwrite=options.overwrite)

    check()
    if directory.holds(run.inputs) and not options.overwrite:
        progress.say(f"{output}: is complete already")
        return load_predictors(output)
    # Resolved, so that a link stays a link to the new folder.
    with reserve(output.resolve(), overwrite=True, check=check, parents=True) as reserved:
        run.check_blocks()
        output.mkdir(exist_ok=True)
        if found := directory.open(run.inputs, run.candidate_inputs):
            progress.say(f"{output}: {found}")
        return run.run(reserved)


@dataclass(frozen=True)
class _TrainingRun:
    model: Path
    profile: Profile
    options: TrainOptions
    progress: Progress
    directory: TrainingDirectory
    mark: str

    @cached_property
    def device(self) -> str:
        wanted = self.options.device
        if wanted == "cuda" and not torch.cuda.is_available():
            raise UsageError("--device cuda: PyTorch finds no CUDA device; use --device cpu")
        return "cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu"

    def require_bf16(self) -> None:
        """Raise `UsageError` if predictors cannot be fitted in bfloat16."""
        if self.device == "cuda":
            raise UsageError("--bf16: predictors are fitted in bfloat16 on the CPU only; add --device cpu")
        require_bf16()

    @cached_property
    def candidate_inputs(self) -> str:
        """Return a hash of everything that the candidates depend on."""
        o = self.options
        ranks = o.ranks if not isinstance(o.ranks, dict) else sorted(o.ranks.items())
        facts = json.loads((self.profile.folder / "profile.json").read_text(encoding="utf-8"))
        trained = (o.kind, o.input, ranks, o.weighting, o.epochs, o.recall, o.seed, self.device)
        # float32 adds nothing, so that training begun before there was a choice is known again.
        return digest(__version__, self.mark, facts, trained, *(["bf16"] if o.bf16 else []))

    @cached_property
    def inputs(self) -> str:
        """Return a hash of everything that the result depends on."""
        o = self.options
        chosen = (o.accuracy_bound, o.budget, o.recall, o.computed_ratio, o.exact, o.rounds, o.check_tokens)
        return digest(self.candidate_inputs, chosen)

    @cached_property
    def captured(self) -> Captured:
        with self.progress.step("capture"):
            captured = load_model(self.model, self.options.activation)
        for line in captured.warnings:
            self.progress.say(line)
        return captured

    @cached_property
    def graph_module(self) -> GraphModule:
        return canonicalize(self.captured.graph_module)

    @cached_property
    def layers(self) -> list[int]:
        return sorted(find_blocks(self.graph_module))

    def check_blocks(self) -> None:
        """Raise `UsageError` if the model does not have the profile's layers or tokens.

        Raise `UnsupportedModelError` for experts whose neurons are never silent.
        """
        folder, profiled = self.profile.folder, self.profile.layers
        blocks = find_blocks(self.graph_module)
        check_experts_fire(str(self.model), blocks.values())
        if [layer.layer for layer in profiled] != self.layers:
            raise UsageError(f"{folder}: has {len(profiled)} layers, the model {len(self.layers)}; profile it again")
        shapes = block_shapes(self.graph_module)
        for layer in profiled:
            fits = BlockShape(layer.neurons, self.profile.hidden) == shapes[layer.layer]
            fits &= layer.experts == expert_count(blocks[layer.layer])
            if not fits or (layer.place == "stream" and not reads_norm(blocks[layer.layer])):
                raise UsageError(f"{folder}: layer {layer.layer} is another block than the model's; profile it again")
        vocabulary = self.captured.facts.vocab
        for windows in (self.profile.calibration(), self.profile.held_out()):
            if any(not 0 <= token < vocabulary for window in windows for token in window):
                raise UsageError(f"{folder}: has tokens that the model does not have; profile it again")

    def run(self, reserved: OutputPath) -> Predictors:
        results = self.train()
        budget = int(self.options.budget * self.captured.facts.parameters)
        limits = ChoiceLimits(budget, self.options.computed_ratio, self.options.exact)
        selection = Selection.first(self.layers, self.options.recall, limits, self._measured())
        selection, facts = self.meet_bound(results, selection)
        with self.directory.publishing(reserved) as folder:
            self._assemble(folder, results, selection, facts)
        return load_predictors(self.directory.folder)

    def _measured(self) -> dict[str, float]:
        """Return the perplexities that an earlier run measured."""
        begun = Selection.read(self.directory)
        return {} if begun is None else begun.measured

    def train(self) -> list[LayerResult]:
        """Train the layers that have no result yet; return the results of all layers, in order."""
        missing = [layer for layer in self.layers if not self.directory.layer_file(layer).is_file()]
        with self.progress.step("train layers", len(self.layers)) as advance:
            advance(len(self.layers) - len(missing))
            for _ in self._trained(missing):
                advance(1)
        return [load_result(self.directory.layer_file(layer)) for layer in self.layers]

    def _trained(self, missing: list[int]) -> Iterator[LayerResult]:
        jobs = count_jobs(self.options.jobs, max(1, len(missing)), self._job_bytes())
        return train_locally(missing, self.prepare, self.directory.layer_file, jobs)

    def _job_bytes(self) -> int:
        """Return an upper bound of a job's memory: labels, samples, the block's weights, the largest candidate."""
        neurons, hidden = max(layer.neurons for layer in self.profile.layers), self.profile.hidden
        samples = self.profile.sample_count
        squares = 6 * hidden * hidden
        return 2 * samples * (neurons + 2 * hidden) + 4 * (squares + hidden * neurons * 8) + (256 << 20)

    def prepare(self, layer: int) -> tuple[LayerData, JobSettings]:
        """Return the data and the settings of a layer's job."""
        wanted = [layer]
        if self.options.input in ("auto", "previous") and layer - 1 in self.layers and self.options.kind == "learned":
            wanted.append(layer - 1)
        profiles = {each.layer: each for each in self.profile.layers}
        samples = {number: (self.profile.samples(number), profiles[number].place) for number in wanted}
        rule = self.profile.firing_rules[layer]
        gains = self.profile.gains(layer) if profiles[layer].experts else None
        data = layer_data(self.graph_module, self.captured.weights, layer, samples, rule, gains)
        o = self.options
        trained = (o.weighting, o.epochs, o.recall, o.seed, self.device)
        return data, JobSettings(o.kind, o.input, o.rank_of(layer), *trained, self._skewness(layer), o.bf16)

    def _skewness(self, layer: int) -> float:
        counts = self.profile.counts(layer).sort(descending=True).values.double()
        total = float(counts.sum())
        return float(counts[: max(1, round(_MOST_ACTIVE * len(counts)))].sum()) / total if total else 1.0

    def meet_bound(self, results: list[LayerResult], selection: Selection) -> tuple[Selection, dict[str, Any]]:
        """Measure the choice, and tighten it in the layers with the largest error until it is within the bound.

        Returns:
            The selection that is within the bound, and the facts about the check for `predictors.json`.

        Raises:
            AccuracyError: No choice within the budget and the number of rounds keeps the bound.
        """
        check, tried = self._accuracy_check(selection), self.directory.work / "tried"
        tried.mkdir(exist_ok=True)
        for number in range(self.options.rounds + 1):
            selection.write(self.directory)
            predictors = self._assemble(tried, results, selection, {})
            perplexity, dense = check.predicted(choice_key(predictors.layers), predictors), check.dense()
            selection.write(self.directory)
            change = perplexity / dense - 1
            if self.options.accuracy_bound is None or change <= self.options.accuracy_bound:
                break
            worst = rank_layers_by_error({layer.layer: layer.missed_energy for layer in check.layers(predictors)})
            tighter = selection.tightened(worst)
            if number == self.options.rounds or not worst or not selection.changes(tighter, results):
                self._discard()
                raise AccuracyError(_inaccurate_message(change, self.options.accuracy_bound, worst), worst)
            self.progress.say(f"perplexity {change:+.3%}: layers {', '.join(map(str, worst))} get larger predictors")
            selection = tighter
        facts = {
            "bound": self.options.accuracy_bound,
            "dense_perplexity": dense,
            "perplexity": perplexity,
            "relative_change": change,
            "tokens": sum(len(window) - 1 for window in check.windows),
            "text": self.profile.held_out_source,
            "rounds": number,
            "targets": [selection.targets[layer] for layer in self.layers],
            "layers": [layer_figures(layer) for layer in check.layers(predictors)],
        }
        selection.write(self.directory, facts)
        self._discard()
        return selection, facts

    def _accuracy_check(self, selection: Selection) -> AccuracyCheck:
        windows = first_windows(self.profile.held_out(), self.options.check_tokens)
        weights, rules = self.captured.weights, self.profile.firing_rules
        return AccuracyCheck(self.graph_module, weights, windows, rules, self.progress, known=selection.measured)

    def _assemble(
        self, folder: Path, results: list[LayerResult], selection: Selection, facts: dict[str, Any]
    ) -> Predictors:
        places = {layer: self.directory.layer_file(layer) for layer in self.layers}
        model = {
            "fingerprint": self.mark,
            "name": self.profile.model_name,
            "parameters": self.captured.facts.parameters,
        }
        return assemble(folder, results, choices=selection.choices(results), files=places, model=model, accuracy=facts)

    def _discard(self) -> None:
        shutil.rmtree(self.directory.work / "tried", ignore_errors=True)


def _inaccurate_message(change: float, bound: float, layers: list[int]) -> str:
    return (
        f"with predictors the perplexity rises by {change:.3%}, more than {bound:.3%}; most is missed in layers "
        f"{', '.join(map(str, layers))}; allow more with --accuracy-bound or --budget, or exact predictors"
    )
