"""The lossy predictors of one compilation: where they come from, what they cost, and how they grow.

They are, in this order,

1. those of the folder `predictors`;
2. those that lie beside the model's weights, `predictors.safetensors`, as `picompile synth` writes them;
3. trained on the profile in the folder `profile`, or on one that is made first, in the work folder.

Only predictors that were trained here can grow: `train` keeps its candidates.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picompile.compile_options import CompileOptions
from picompile.errors import AccuracyError, UsageError
from picompile.frontend.checkpoint import fingerprint
from picompile.output import OutputPath
from picompile.predictors import Predictors, block_shapes, load_predictors
from picompile.predictors.accuracy import rank_layers_by_error
from picompile.progress import Progress

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from picompile.frontend import Captured
    from picompile.predictors.accuracy import LayerAccuracy
    from picompile.predictors.profile import Profile
    from picompile_passes.graph.materialize import WeightSource
    from picompile_passes.passes.insert_predictors import InsertPredictors


# What each layer's mask is judged on; the gate itself reads more.
_LAYER_TOKENS = 1024


@dataclass(frozen=True)
class HeldOut:
    """Text that nothing was trained on, as windows of token ids, and where it came from."""

    windows: Sequence[Sequence[int]]
    source: str


@dataclass(frozen=True)
class PredictorSet:
    """Predictors and the text that they are judged on.

    Without `predictors` it is `kind` in every layer, which needs no weights. `trained` is the folder that holds
    candidates of larger ones, `profile` what they were trained on.
    """

    kind: str
    predictors: Predictors | None
    held_out: HeldOut
    firing_thresholds: dict[int, float] = field(default_factory=dict)
    trained: Path | None = None
    profile: "Profile | None" = None

    def insert_pass(self) -> "InsertPredictors":
        """The pass that puts them into a canonical graph."""
        from picompile_passes.passes.insert_predictors import InsertPredictors

        return InsertPredictors(self.kind) if self.predictors is None else self.predictors.insert_pass()

    def weights(self, base: "WeightSource") -> "WeightSource":
        """The model's weights and theirs."""
        return base if self.predictors is None else self.predictors.weights(base)

    def larger(self, layers: Sequence[int]) -> "PredictorSet | None":
        """The same with larger predictors in `layers`, or None where there are none."""
        if self.trained is None or not layers:
            return None
        from picompile.predictors.train import tighten

        larger = tighten(self.trained, layers)
        return None if larger is None else replace(self, predictors=larger)

    def measure(
        self, artifact: Path, captured: "Captured", context: int, options: CompileOptions, progress: Progress
    ) -> dict[str, Any]:
        """What the predictors cost in `artifact`, for its report. Raises `AccuracyError` beyond the bound."""
        from picompile.predictors.accuracy import check_artifact, first_windows

        # The last id of a window is only predicted.
        windows = first_windows(self.held_out.windows, options.gate_tokens, context + 1)
        result = check_artifact(artifact, windows, progress=progress)
        layers = self._layers(captured, context, progress)
        change = result.relative_change
        if options.gate is not None and not change <= options.gate:
            blamed = rank_layers_by_error({layer.layer: layer.missed_energy for layer in layers})
            raise AccuracyError(_refusal(change, options.gate, layers, blamed), blamed)
        return {
            "bound": options.gate,
            "dense_perplexity": result.dense_perplexity,
            "perplexity": result.perplexity,
            "relative_change": change,
            "tokens": result.tokens,
            "text": self.held_out.source,
            "layers": [asdict(layer) for layer in layers],
        }

    def _layers(self, captured: "Captured", context: int, progress: Progress) -> "list[LayerAccuracy]":
        from picompile.predictors.accuracy import first_windows, measure_layers

        predicted = self.insert_pass()(canonical_graph(captured)).graph_module
        windows = first_windows(self.held_out.windows, _LAYER_TOKENS, context)
        return measure_layers(predicted, self.weights(captured.weights), windows, self.firing_thresholds, progress)


def canonical_graph(captured: "Captured") -> "GraphModule":
    """The captured graph, canonicalized."""
    from picompile_passes.passes.canonicalize import CANONICALIZE
    from picompile_passes.pipeline import Pipeline

    return Pipeline(tuple(CANONICALIZE))(captured.graph_module).graph_module


def _refusal(change: float, bound: float, layers: "Sequence[LayerAccuracy]", blamed: Sequence[int]) -> str:
    recalls = {layer.layer: layer.weighted_recall for layer in layers}
    named = ", ".join(f"{layer} (recall by contribution {recalls[layer]:.2%})" for layer in blamed[:4])
    return (
        f"the predictors raise the perplexity by {100 * change:.3g} %, more than {100 * bound:.3g} %; most is missed "
        f"in layers {named or 'none'}; train larger ones, or allow more with --gate"
    )


@contextmanager
def find_prediction(
    model: Path | None, captured: "Captured", place: OutputPath, options: CompileOptions, progress: Progress
) -> Iterator[PredictorSet]:
    """The predictors that `options` ask for; what had to be made without a work folder is removed in the end.

    Raises `UsageError` for predictors or a profile of another model.
    """
    if model is None:
        raise UsageError("lossy predictors need a model folder; a module in memory can be compiled with exact or none")
    kind = str(options.predictor)
    if kind not in ("learned", "sign"):
        yield PredictorSet(kind, None, _held_out(model, options))
        return
    found = options.predictors or _beside(model, options)
    if found is not None:
        yield _given(model, captured, found, options)
        return
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
        yield _trained(model, captured, options.work, options, progress)
        return
    with place.scratch() as work:
        yield _trained(model, captured, work, options, progress)


def _beside(model: Path, options: CompileOptions) -> Path | None:
    """Predictors in the model's own folder, unless the user gave something to train on."""
    beside = model / "predictors.safetensors"
    wanted = options.predictor == "learned" and not (options.profile or options.calibration)
    return beside if wanted and beside.is_file() else None


def _given(model: Path, captured: "Captured", path: Path, options: CompileOptions) -> PredictorSet:
    predictors = load_predictors(path)
    predictors.require_model(fingerprint(model), block_shapes(canonical_graph(captured)))
    return PredictorSet(str(options.predictor), predictors, _held_out(model, options))


def _held_out(model: Path, options: CompileOptions) -> HeldOut:
    from picompile.predictors.profile import held_out_windows, load_profile

    if options.profile is not None:
        profile = load_profile(options.profile)
        profile.require_model(fingerprint(model))
        return _held_out_of(profile)
    windows, source = held_out_windows(model, options.calibration, options.gate_tokens)
    return HeldOut(windows, source)


def _held_out_of(profile: "Profile") -> HeldOut:
    return HeldOut(profile.held_out(), profile.held_out_source)


def _trained(
    model: Path, captured: "Captured", work: Path, options: CompileOptions, progress: Progress
) -> PredictorSet:
    from picompile.predictors.profile import ProfileOptions, load_profile, profile_model
    from picompile.predictors.train import TrainOptions, train_predictors

    if options.profile is not None:
        profile = load_profile(options.profile)
        profile.require_model(fingerprint(model))
    else:
        settings = ProfileOptions(calibration=options.calibration)
        profile = profile_model(model, work / "profile", settings, progress)
    folder = work / "predictors"
    training = TrainOptions(kind=options.predictor or "learned", gate=options.gate)
    predictors = train_predictors(model, profile, folder, training, progress)
    thresholds = {layer.layer: layer.threshold for layer in profile.layers}
    return PredictorSet(training.kind, predictors, _held_out_of(profile), thresholds, folder, profile)
