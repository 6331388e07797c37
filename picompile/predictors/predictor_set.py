"""The lossy predictors of one compilation: their source, their cost, and larger ones in their place.

The first of these sources that exists is used:

1. the folder `predictors`;
2. `predictors.safetensors` beside the model's weights, as `picompile synth` writes it;
3. the model's own file, if it is one of PowerInfer's;
4. training, on the profile in the folder `profile`, or on one that is made first, in the work folder.

Only predictors that were trained here can be replaced by larger ones: `train` keeps its candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from picompile.choices import TRAINED
from picompile.errors import UsageError
from picompile.frontend.captured import Captured
from picompile.frontend.checkpoint import fingerprint
from picompile.frontend.model_file import is_gguf, opened_gguf
from picompile.predictors.accuracy import AccuracyReport, check_artifact, first_windows, measure_layers
from picompile.predictors.config import PredictorOptions
from picompile.predictors.files import load_predictors
from picompile.predictors.firing import FiringRule
from picompile.predictors.powerinfer.importer import import_predictors
from picompile.predictors.powerinfer.sources import PredictorSource, find_source
from picompile.predictors.profile.options import ProfileOptions
from picompile.predictors.profile.profile import Profile, load_profile
from picompile.predictors.profile.run import profile_model
from picompile.predictors.profile.windows import held_out_windows
from picompile.predictors.store import Predictors, block_shapes
from picompile.predictors.train.choose import tighten
from picompile.predictors.train.options import TrainOptions
from picompile.predictors.train.run import train_predictors
from picompile.progress import Progress
from picompile_passes.graph.materialize import WeightSource
from picompile_passes.passes.canonicalize import canonical_form
from picompile_passes.passes.insert_predictors import InsertPredictors

# How much text each layer's mask is judged on; the accuracy check of the whole model reads more.
_LAYER_TOKENS = 256


@dataclass(frozen=True)
class HeldOut:
    """Text that nothing was trained on, as windows of token ids, and where it came from."""

    windows: Sequence[Sequence[int]]
    source: str


@dataclass(frozen=True)
class PredictorSet:
    """Predictors and the text that they are judged on.

    Without `predictors`, every layer has a predictor of `kind`, which needs no weights. `trained` is the folder that
    holds candidates for larger ones, `profile` what they were trained on.
    """

    kind: str
    predictors: Predictors | None
    held_out: HeldOut
    firing_rules: dict[int, FiringRule] = field(default_factory=dict)
    trained: Path | None = None
    profile: Profile | None = None

    def insert_pass(self) -> InsertPredictors:
        """Return the pass that puts the predictors into a canonical graph."""
        return InsertPredictors(self.kind) if self.predictors is None else self.predictors.insert_pass()

    def weights(self, base: WeightSource, quant: str | None = None) -> WeightSource:
        """Return a source of the model's weights, `base`, and those of the predictors, rounded to the format `quant`.

        None rounds nothing.
        """
        return base if self.predictors is None else self.predictors.weights(base, quant)

    def choose_larger(self, layers: Sequence[int]) -> "PredictorSet | None":
        """Choose larger predictors for `layers` among the trained candidates. Return None if there are none."""
        if self.trained is None or not layers:
            return None

        larger = tighten(self.trained, layers)
        return None if larger is None else replace(self, predictors=larger)

    def check_accuracy(
        self,
        artifact: Path,
        captured: Captured,
        quant: str,
        context: int,
        config: PredictorOptions,
        progress: Progress,
    ) -> AccuracyReport:
        """Return what the predictors cost.

        Args:
            artifact: the folder of an artifact with these predictors that runs on this machine.
            captured: its model.
            quant: the weight format of the predictors in it; figures of layers are of predictors in that format.
            context: of the artifact's cache, in tokens.
            config: has the bound, and how many tokens to read.
            progress: is told of each step.
        """
        # The last id of a window is only predicted.
        windows = first_windows(self.held_out.windows, config.check_tokens, context + 1)
        result = check_artifact(artifact, windows, progress=progress, bound=config.finite_bound)
        predicted = self.insert_pass()(canonical_form(captured.graph_module)).graph_module
        layer_windows = first_windows(self.held_out.windows, _LAYER_TOKENS, context)
        weights = self.weights(captured.weights, quant)
        layers = measure_layers(predicted, weights, windows=layer_windows, rules=self.firing_rules, progress=progress)
        return AccuracyReport(config.finite_bound, result, self.held_out.source, tuple(layers))


def obtain_predictors(
    checkpoint: Path | None, captured: Captured, scratch: Path, config: PredictorOptions, progress: Progress
) -> PredictorSet | None:
    """Return the lossy predictors that `config` asks for, trained if need be; None where the predictor is lossless.

    Args:
        checkpoint: the model's folder, None for a module in memory.
        captured: the model.
        scratch: a folder for what has to be made and is not kept; it must stay as long as the predictors are used.
        config: which predictors, and what to train them on.
        progress: is told of each step.

    Raises:
        UsageError: predictors or a profile are of another model, or the model is a module in memory.
    """
    if config.is_lossless:
        return None
    if checkpoint is None:
        raise UsageError("lossy predictors need a model folder; a module in memory can be compiled with exact or none")
    if config.kind not in TRAINED:
        return PredictorSet(config.kind, None, find_held_out(checkpoint, config))
    found = config.predictors or _beside(checkpoint, config) or _within(checkpoint, scratch, config, progress)
    if found is not None:
        return _given(checkpoint, captured, found, config)
    work = config.work or scratch / "work"
    work.mkdir(parents=True, exist_ok=True)
    return _trained(checkpoint, work, config, progress)


def _beside(model: Path, config: PredictorOptions) -> Path | None:
    """Return the predictors in the model's own folder, if any."""
    beside = (model.parent if model.is_file() else model) / "predictors.safetensors"
    return beside if _takes_found(config) and beside.is_file() else None


def _within(model: Path, scratch: Path, config: PredictorOptions, progress: Progress) -> Path | None:
    """Return a folder in `scratch` with the predictors of PowerInfer that are in the file `model`, if any."""

    if not _takes_found(config) or not is_gguf(model):
        return None
    if not PredictorSource(model, 0.0, opened_gguf(model).header).tensors:
        return None
    import_predictors(find_source(model), model, scratch / "imported", progress, activation=config.activation)
    return scratch / "imported"


def _takes_found(config: PredictorOptions) -> bool:
    """Return whether predictors that are there are taken: not where the user gave something to train on."""
    return config.kind == "learned" and not (config.profile or config.calibration)


def _given(model: Path, captured: Captured, path: Path, config: PredictorOptions) -> PredictorSet:
    predictors = load_predictors(path)
    predictors.require_model(fingerprint(model, config.activation), block_shapes(canonical_form(captured.graph_module)))
    return PredictorSet(config.kind, predictors, find_held_out(model, config))


def find_held_out(model: Path, config: PredictorOptions) -> HeldOut:
    """Return held-out text: that of the profile that `config` names, or else from its calibration text.

    Raises:
        UsageError: the text is too short, the model has no tokenizer, or the profile is of another model.
    """

    if config.profile is not None:
        profile = load_profile(config.profile)
        profile.require_model(fingerprint(model, config.activation))
        return _held_out_of(profile)
    windows, source = held_out_windows(model, config.calibration, config.check_tokens, activation=config.activation)
    return HeldOut(windows, source)


def _held_out_of(profile: Profile) -> HeldOut:
    return HeldOut(profile.held_out(), profile.held_out_source)


def _trained(model: Path, work: Path, config: PredictorOptions, progress: Progress) -> PredictorSet:

    if config.profile is not None:
        profile = load_profile(config.profile)
        profile.require_model(fingerprint(model, config.activation))
    else:
        settings = ProfileOptions(calibration=config.calibration, activation=config.activation)
        profile = profile_model(model, work / "profile", settings, progress)
    folder = work / "predictors"
    training = TrainOptions(kind=config.kind, accuracy_bound=config.finite_bound, activation=config.activation)
    predictors = train_predictors(model, profile, output=folder, options=training, progress=progress)
    return PredictorSet(
        training.kind,
        predictors,
        held_out=_held_out_of(profile),
        firing_rules=profile.firing_rules,
        trained=folder,
        profile=profile,
    )
