"""The bytes of a model to plan and how its neurons fire, from a checkpoint, a profile or a shape."""

import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picompile.choices import CHUNK_OPTION, CONTEXT, FORMATS_HELP, KV_DTYPE, PREDICTOR_QUANT
from picompile.errors import UsageError
from picompile.frontend.activation import ACTIVATION
from picompile.options import documented, option
from picompile.progress import Progress

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from picompile.placement.firing import Firing
    from picompile.placement.model_bytes import ModelBytes, Packing
    from picompile.predictors.profile.options import ProfileOptions
    from picompile.predictors.profile.profile import Profile
    from picompile.predictors.store import BlockShape, Predictors


NOT_KEPT = "a profile made for this plan"
# To find the hottest neurons takes fewer tokens than to train predictors. In the bundled model the hottest 10, 30 and
# 50 % found with this many tokens make 99.4 % (98.9 % at least) of the firings that those found with 65,536 make; with
# half as many tokens it is 98.9 % (97.9 %).
_TOKENS = 16_384


@dataclass(frozen=True)
class FiringSource:
    """How neurons fire: a profile, or the text of a `curve`. `source` is the name for a profile that is not kept."""

    profile: "Profile | None"
    curve: str | None = None
    source: str | None = None

    def firing(self, shape: tuple[int, int], batch: int = 1, ratios: Mapping[int, float] | None = None) -> "Firing":
        """Return the firing of a model of `shape` (layers, neurons).

        `ratios` has by layer how many neurons are computed for one that fires, 1 without it; `batch` as in
        `firing_of_profile`.
        """
        from picompile.placement.firing import firing_of_curve, firing_of_profile

        if self.profile is not None:
            firing = firing_of_profile(self.profile, batch, ratios)
            return firing if self.source is None else replace(firing, source=self.source)
        ratio = sum(ratios.values()) / len(ratios) if ratios else 1.0
        return firing_of_curve(str(self.curve), *shape, batch=batch, computed=ratio)


def given_profile(profile: Path | None, work: Path | None, fingerprint: str) -> "Profile | None":
    """Return the profile in the folder `profile`, or else the one in the folder `work`; None if one has to be made.

    Raise `UsageError` for a profile of another model.
    """
    from picompile.predictors.profile.profile import load_profile, read_description

    if profile is None:
        if work is None or not (read_description(work / "profile") or {}).get("complete"):
            return None
        profile = work / "profile"
    found = load_profile(profile)
    found.require_model(fingerprint)
    return found


@contextmanager
def made_profile(
    model: Path, work: Path | None, options: "ProfileOptions", progress: Progress
) -> Iterator[FiringSource]:
    """Make a profile of `model` in the folder `work`. Raise what profiling raises.

    Without `work` the profile is deleted at the end of the block, and reads no more text than a plan needs.
    """
    from picompile.predictors.profile.run import profile_model
    from picompile_codegen.build.object_cache import temporary_folder

    if work is not None:
        work.mkdir(parents=True, exist_ok=True)
        yield FiringSource(profile_model(model, work / "profile", options, progress))
        return
    with temporary_folder() as folder:
        short = replace(options, tokens=min(options.tokens, _TOKENS), samples=1)
        profile = profile_model(model, folder / "profile", short, progress)
        yield FiringSource(profile, source=NOT_KEPT)


_PROFILE_FILE = "profile.json"
# Neurons in a layer of the curve that ranks are estimated from, while the number of neurons is not known yet.
_SAMPLE = 1000


@documented
@dataclass(frozen=True)
class ModelOptions:
    """The user's options about the model. `source` is a checkpoint or a profile, None if there is a `shape`.

    `on_gpu` says whether there is a GPU, on which the default of `chunk` depends.
    """

    source: Path | None = None
    shape: str | None = option(
        None, "No model, but a shape: opt-175b, llama-70b, …, or a config.json.", metavar="NAME|FILE"
    )
    activation: str | None = ACTIVATION.field(None)
    firing: str | None = option(
        None,
        "How neurons fire where there is no profile: opt, falcon, bamboo, reglu-7b, reglu-13b, reglu-70b; the share "
        "that fires on a token, 10%; or also the share that makes 80 % of the firings, 10%:30%.",
        metavar="CURVE",
    )
    profile: Path | None = option(None, "How MODEL's neurons fire. Default: profile it.", metavar="FOLDER")
    predictors: Path | None = option(None, "What train made: real sizes, and what they compute.", metavar="FOLDER")
    work: Path | None = option(None, "Take and keep profile and predictors here, as compile does.", metavar="DIR")
    quant: str = option("q4", f"{FORMATS_HELP}.", metavar="FORMAT")
    predictor: str | None = option(
        None,
        "learned, exact, sign or none, or a plug-in's. Default: learned where neurons can be silent, else none.",
        metavar="KIND",
    )
    predictor_quant: str | None = PREDICTOR_QUANT.field(None)
    predictor_input: str | None = option(
        None, "What the predictors of a shape read, as with train. Default: block.", choices=("block", "previous")
    )
    context: int | None = CONTEXT.field(None)
    chunk: int | None = CHUNK_OPTION.field(None)
    batch: int = option(1, "Sequences that are decoded at the same time.", metavar="N", least=1, most=65_536)
    kv_dtype: str | None = KV_DTYPE.field(None)
    on_gpu: bool = False

    @property
    def is_profile(self) -> bool:
        """Whether the source is a profile. A folder that holds both counts as a model."""
        source = self.source
        if source is None or source.is_file():
            return False
        return not (source / "config.json").is_file() and (source / _PROFILE_FILE).is_file()


@dataclass(frozen=True)
class PlannedModel:
    """A model's bytes and its firing, and the checkpoint's fingerprint, None for a shape."""

    model: "ModelBytes"
    firing: "Firing"
    fingerprint: str | None


def find_model(options: ModelOptions, progress: Progress) -> PlannedModel:
    """Return the model, counted. Raise `UsageError`, `UnsupportedModelError`, and what profiling raises."""
    if options.source is None:
        with _uncollected():
            from picompile.synth.shapes import find_config

            name, config = find_config(str(options.shape))
            return _of_config(name, config, FiringSource(None, options.firing), None, options, progress)
    if not options.is_profile:
        return _of_checkpoint(options.source, options, progress)
    from picompile.predictors.profile.profile import load_profile

    profile = load_profile(options.source)
    if profile.config is None:
        raise UsageError(
            f"{options.source}: does not say what shape its model has, as profiles of earlier versions; "
            f"plan MODEL --profile {options.source}"
        )
    return _of_config(profile.model_name, profile.config, FiringSource(profile), profile.fingerprint, options, progress)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep Python from looking for garbage while PyTorch and TVM are imported, and among what they define later on.

    It would take a quarter of the time of planning a shape.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def model_firing(model: "ModelBytes", source: FiringSource, predictors: "Predictors | None") -> "Firing":
    """Return how the neurons of `model` fire. Raise `UsageError` for a profile with other layers or neurons."""
    from picompile.placement.firing import COMPUTED_RATIOS, computed_ratios

    if predictors is not None:
        ratios = computed_ratios(predictors)
    else:
        ratios = dict.fromkeys(range(len(model.layers)), COMPUTED_RATIOS.get(model.predictor, 1.0))
    firing = source.firing((len(model.layers), model.layers[0].neurons), model.batch, ratios)
    found = [len(layer.shares) for layer in firing.layers]
    if found != [layer.neurons for layer in model.layers]:
        raise UsageError(f"{firing.source} has other layers or neurons than the model; profile the model again")
    return firing


def _of_config(
    name: str,
    config: Mapping[str, Any],
    source: FiringSource,
    fingerprint: str | None,
    options: ModelOptions,
    progress: Progress,
) -> PlannedModel:
    """Count two layers for all, unless there are predictors: these differ from layer to layer."""
    from picompile.placement.counting import count_bytes, shape_bytes
    from picompile.placement.model_bytes import predicting_early

    packing = _packing(options, config.get("max_position_embeddings"), _activation(config))
    ranks = source.firing((_layers(config), _SAMPLE))
    with progress.step("count"):
        if options.predictors is None:
            model = shape_bytes(name, config, packing, ranks)
            if options.predictor_input == "previous":
                model = predicting_early(model, range(len(model.layers)))
            return PlannedModel(model, model_firing(model, source, None), fingerprint)
        from picompile.frontend.hf import capture_config
        from picompile.predictors.files import load_predictors

        predictors = load_predictors(options.predictors)
        # Checked before all layers are captured, which takes seconds for a few.
        if len(predictors.layers) != _layers(config):
            raise UsageError(
                f"{options.predictors}: has {len(predictors.layers)} layers, the model {_layers(config)}; "
                "train predictors for this model"
            )
        graph_module = capture_config(config)
        predictors.require_model(fingerprint, _block_shapes(graph_module))
        model = count_bytes(name, graph_module, packing, predictors, ranks)
        return PlannedModel(model, model_firing(model, source, predictors), fingerprint)


def _of_checkpoint(folder: Path, options: ModelOptions, progress: Progress) -> PlannedModel:
    from picompile.frontend.checkpoint import fingerprint
    from picompile.frontend.hf import load_model
    from picompile.placement.counting import count_bytes
    from picompile.predictors.profile.options import ProfileOptions

    mark = fingerprint(folder, options.activation)
    given = _given(options, mark)
    loaded = _load_predictors(folder, options)
    with progress.step("capture"):
        captured = load_model(folder, options.activation)
    if captured.warning is not None:
        progress.say(captured.warning)
    facts, graph_module = captured.facts, captured.graph_module
    packing = _packing(options, facts.max_positions, facts.activation)
    predictors = loaded if options.predictors is not None or packing.predictor == "learned" else None
    if predictors is not None:
        predictors.require_model(mark, _block_shapes(graph_module))
    settings = ProfileOptions(activation=options.activation)
    known = made_profile(folder, options.work, settings, progress) if given is None else nullcontext(given)
    with known as source, progress.step("count"):
        model = count_bytes(facts.name, graph_module, packing, predictors, source.firing((facts.layers, _SAMPLE)))
        return PlannedModel(model, model_firing(model, source, predictors), mark)


def _given(options: ModelOptions, fingerprint: str) -> FiringSource | None:
    """Return the curve or profile that was given or is in the work folder; None if a profile has to be made."""
    if options.firing is not None:
        return FiringSource(None, options.firing)
    profile = given_profile(options.profile, options.work, fingerprint)
    return None if profile is None else FiringSource(profile)


def _packing(options: ModelOptions, limit: object, activation: str) -> "Packing":
    """Return how the model is packed; `limit` is the number of positions in its config."""
    from picompile.choices import default_chunk, resolve_context
    from picompile.placement.model_bytes import Packing
    from picompile_passes.dialect.activations import parse_activation

    longest = limit if isinstance(limit, int) and limit > 0 else None
    context = resolve_context(options.context, longest)
    predictor = options.predictor
    if predictor is None:
        predictor = "learned" if options.predictors or parse_activation(activation).sparse else "none"
    chunk = options.chunk or default_chunk(context, on_gpu=options.on_gpu)
    return Packing(
        options.quant,
        predictor,
        context,
        options.batch,
        options.kv_dtype,
        chunk,
        predictor_quant=options.predictor_quant or "auto",
    )


def _activation(config: Mapping[str, Any]) -> str:
    """Return the dialect's text for the activation of a config; transformers is asked where it names none."""
    from picompile.frontend.families import activation_text, find_family

    family = find_family(config)
    if family.is_known and (family.fixed_activation is not None or family.activation in config):
        return activation_text(config, family, "")
    from picompile.frontend.hf import activation_of
    from picompile.placement.counting import shortened

    layers = _layers(config)
    return activation_of(shortened(config, layers, min(layers, 2)))


def _layers(config: Mapping[str, Any]) -> int:
    """Return the number of layers in a config, 1 where it is wrong: counting the model's bytes checks it later."""
    from picompile.choices import MOST_LAYERS

    layers = config.get("num_hidden_layers")
    return layers if type(layers) is int and 0 < layers < MOST_LAYERS else 1


def _load_predictors(folder: Path, options: ModelOptions) -> "Predictors | None":
    """Return the predictors that were given, or that compile would take: from its work folder, or beside the model."""
    from picompile.predictors.files import load_predictors

    if options.predictors is not None:
        return load_predictors(options.predictors)
    if options.predictor not in (None, "learned"):
        return None
    if options.work is not None and (options.work / "predictors" / "predictors.json").is_file():
        return load_predictors(options.work / "predictors")
    beside = (folder.parent if folder.is_file() else folder) / "predictors.safetensors"
    return load_predictors(beside) if beside.is_file() else None


def _block_shapes(graph_module: "GraphModule") -> "dict[int, BlockShape]":
    from picompile.predictors.store import block_shapes
    from picompile_passes.passes.canonicalize import canonicalize

    return block_shapes(canonicalize(graph_module))
