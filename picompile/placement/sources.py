"""The bytes of a model to plan and how its neurons fire, from a checkpoint, a profile or a shape.

Shapes need no transformers, so what captures a model is imported where that is done.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.fx import GraphModule

from picompile.choices import (
    DEFAULT_QUANT,
    MOST_LAYERS,
    STORED,
    default_chunk,
    planned_format,
    resolve_context,
)
from picompile.errors import DoesNotFitError, UsageError
from picompile.frontend.activation import activation_title, with_activation
from picompile.frontend.captured import Captured
from picompile.frontend.checkpoint import fingerprint
from picompile.frontend.facts import has_experts, names_experts, no_accelerator
from picompile.frontend.families import activation_text, find_family
from picompile.frontend.stored.choice import choose_stored, default_quant
from picompile.placement.counting import count_bytes, shape_bytes, shortened
from picompile.placement.firing import (
    COMPUTED_RATIOS,
    Firing,
    computed_ratios,
    firing_of_curve,
    firing_of_experts,
    firing_of_profile,
)
from picompile.placement.model_bytes import ModelBytes, Packing, predicting_early
from picompile.placement.model_options import ModelOptions
from picompile.placement.plan import Plan
from picompile.placement.planning import PlanOptions, make_plan
from picompile.predictors.files import load_predictors
from picompile.predictors.profile.options import ProfileOptions
from picompile.predictors.profile.profile import Profile, load_profile, read_description
from picompile.predictors.store import BlockShape, Predictors, block_shapes
from picompile.progress import Progress
from picompile.synth.shapes import find_config
from picompile_codegen.build.object_cache import temporary_folder
from picompile_passes.dialect.activations import parse_activation
from picompile_passes.passes.canonicalize import canonicalize

NOT_KEPT = "a profile made for this plan"
# Neurons in a layer of the curve that ranks are estimated from, while the number of neurons is not known yet.
_SAMPLE = 1000
# To find the hottest neurons takes fewer tokens than to train predictors. In the bundled model the hottest 10, 30 and
# 50 % found with this many tokens make 99.4 % (98.9 % at least) of the firings that those found with 65,536 make; with
# half as many tokens it is 98.9 % (97.9 %).
_TOKENS = 16_384


@dataclass(frozen=True)
class FiringSource:
    """How neurons fire: a profile, or the text of a `curve`. `source` is the name for a profile that is not kept.

    Without either, and without a predictor, every neuron counts as computed, of experts those of the chosen ones.
    """

    profile: Profile | None
    curve: str | None = None
    source: str | None = None

    def typical(self, layers: int) -> Firing | None:
        """Return the firing of a model of so many layers, from which ranks are estimated; None if it is not known."""
        if self.profile is not None:
            return firing_of_profile(self.profile)
        return None if self.curve is None else firing_of_curve(self.curve, layers, _SAMPLE)

    def firing(self, model: ModelBytes, ratios: Mapping[int, float]) -> Firing:
        """Return the firing of `model`; `ratios` has by layer how many neurons are computed for one that fires."""
        if self.profile is not None:
            firing = firing_of_profile(self.profile, model.sequences, ratios)
            if model.predictor == "none" and not model.has_experts:
                # A profile says which neurons are hot, but all of them are computed.
                layers = tuple(replace(each, shares=np.ones_like(each.shares)) for each in firing.layers)
                firing = replace(firing, layers=layers)
            return firing if self.source is None else replace(firing, source=self.source)
        if self.curve is None or model.predictor == "none":
            chosen = (firing_of_experts(each.neurons, each.chosen_share, model.sequences) for each in model.layers)
            return Firing(
                tuple(chosen), "every neuron" + (" of the experts that are chosen" if model.has_experts else "")
            )
        of_kind = cache(partial(self._of_kind, model, sum(ratios.values()) / len(ratios) if ratios else 1.0))
        kinds = [of_kind(layer.neurons, layer.chosen_share) for layer in model.layers]
        return replace(kinds[0], layers=tuple(each.layers[number] for number, each in enumerate(kinds)))

    def _of_kind(self, model: ModelBytes, ratio: float, neurons: int, chosen: float) -> Firing:
        """Return the firing that all layers would have if they were of one kind."""
        return firing_of_curve(
            str(self.curve), len(model.layers), neurons, sequences=model.sequences, computed=ratio, chosen=chosen
        )


def given_profile(profile: Path | None, work: Path | None, fingerprint: str) -> Profile | None:
    """Return the profile in the folder `profile`, or else the one in the folder `work`; None if one has to be made.

    Raise `UsageError` for a profile of another model.
    """
    if profile is None:
        if work is None or not (read_description(work / "profile") or {}).get("complete"):
            return None
        profile = work / "profile"
    found = load_profile(profile)
    found.require_model(fingerprint)
    return found


@contextmanager
def made_profile(model: Path, work: Path | None, options: ProfileOptions, progress: Progress) -> Iterator[FiringSource]:
    """Make a profile of `model` in the folder `work`. Raise what profiling raises.

    Without `work` the profile is deleted at the end of the block, and reads no more text than a plan needs.
    """

    from picompile.predictors.profile.run import profile_model

    if work is not None:
        work.mkdir(parents=True, exist_ok=True)
        yield FiringSource(profile_model(model, work / "profile", options, progress))
        return
    with temporary_folder() as folder:
        short = replace(options, tokens=min(options.tokens, _TOKENS), samples=1)
        profile = profile_model(model, folder / "profile", short, progress)
        yield FiringSource(profile, source=NOT_KEPT)


@dataclass(frozen=True)
class PlannedModel:
    """A model's bytes and its firing, its activation in the dialect's text, and the checkpoint's fingerprint.

    A shape has no fingerprint. `whole` has the bytes if an accelerator computes every neuron of all blocks, where
    formats depend on that.
    """

    model: ModelBytes
    firing: Firing
    fingerprint: str | None
    activation: str
    whole: ModelBytes | None = None


def find_model(options: ModelOptions, progress: Progress) -> PlannedModel:
    """Return the model, counted. Raise `UsageError`, `UnsupportedModelError`, and what profiling raises."""
    if options.source is None:
        name, config = find_config(str(options.shape))
        config = with_activation(config, options.activation)
        return _of_config(
            name,
            config,
            source=FiringSource(None, options.firing),
            fingerprint=None,
            options=options,
            progress=progress,
        )
    if not options.is_profile:
        return _of_checkpoint(options.source, options, progress)
    profile = load_profile(options.source)
    if profile.config is None:
        raise UsageError(
            f"{options.source}: does not say what shape its model has, as profiles of earlier versions; "
            f"plan MODEL --profile {options.source}"
        )
    return _of_config(
        profile.model_name,
        profile.config,
        source=FiringSource(profile),
        fingerprint=profile.fingerprint,
        options=options,
        progress=progress,
    )


def plan_found(found: PlannedModel, options: PlanOptions) -> tuple[ModelBytes, Plan]:
    """Return the plan of a model, and the bytes that it is made for: of whole blocks, if it has them all on the GPU.

    Raises as `make_plan`.
    """
    if found.whole is not None:
        try:
            plan = make_plan(found.whole, found.firing, options)
        except DoesNotFitError:
            plan = None
        if plan is not None and all(layer.hot_neurons == layer.neurons for layer in plan.layers):
            return found.whole, plan
    return found.model, make_plan(found.model, found.firing, options)


def model_firing(model: ModelBytes, source: FiringSource, predictors: Predictors | None) -> Firing:
    """Return how the neurons of `model` fire. Raise `UsageError` for a profile with other layers or neurons."""
    if predictors is not None:
        ratios = computed_ratios(predictors)
    else:
        ratios = dict.fromkeys(range(len(model.layers)), COMPUTED_RATIOS.get(model.predictor, 1.0))
    firing = source.firing(model, ratios)
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

    mixture = names_experts(config)
    if mixture:
        _check_target(name, options)
    activation = _activation(config)
    packing = _packing(options, config.get("max_position_embeddings"), activation, mixture=mixture)
    if packing.predictor != "none" and source.profile is None and source.curve is None:
        profiled = "" if options.hub_name is None else "; or --work DIR, to download the model and to profile it there"
        if parse_activation(activation).sparse:
            why = f"its neurons fire sparsely ({activation_title(activation)}), and --firing says how often"
        else:
            why = f"predictor {packing.predictor} leaves out silent neurons, and --firing says how many fire"
        raise UsageError(
            f"{options.hub_name or name}: {why}; give the name of a curve, such as opt, or a share, such as "
            f"10%{profiled}"
        )
    _say_of_firing(name, options, packing, activation, progress)
    ranks = source.typical(_layers(config))
    with progress.step("count"):
        if options.predictors is None:
            model = shape_bytes(name, config, packing, ranks)
            if options.predictor_input == "previous":
                model = predicting_early(model, range(len(model.layers)))
            return PlannedModel(model, model_firing(model, source, None), fingerprint, activation)

        predictors = load_predictors(options.predictors)
        # Checked before all layers are captured, which takes seconds for a few.
        if len(predictors.layers) != _layers(config):
            raise UsageError(
                f"{options.predictors}: has {len(predictors.layers)} layers, the model {_layers(config)}; "
                "train predictors for this model"
            )
        from picompile.frontend.hf import capture_config

        graph_module = capture_config(config)
        predictors.require_model(fingerprint, _block_shapes(graph_module))
        model = count_bytes(name, graph_module, packing, predictors, firing=ranks)
        return PlannedModel(model, model_firing(model, source, predictors), fingerprint, activation)


def _say_of_firing(name: str, options: ModelOptions, packing: Packing, activation: str, progress: Progress) -> None:
    """Say what a plan assumes if `--firing` does not fit the model's activation or the predictor."""
    if options.firing is None:
        return
    silent = parse_activation(activation).sparse
    if packing.predictor == "none":
        why = "with --predictor none" if silent else f"since {activation} leaves none silent"
        relu = "" if silent else "; --activation relu plans the model as it would be with ReLU"
        progress.say(f"{name}: every neuron is computed {why}, so --firing changes nothing{relu}")
    elif not silent:
        progress.say(
            f"{name}: {activation} leaves no neuron silent; the plan assumes that only those of --firing "
            f"{options.firing} are computed, which changes what the model answers"
        )


def _of_checkpoint(folder: Path, options: ModelOptions, progress: Progress) -> PlannedModel:

    mark = fingerprint(folder, options.activation)
    given = _given(options, mark)
    loaded = _load_predictors(folder, options)
    from picompile.frontend.hf import load_model

    with progress.step("capture"):
        captured = load_model(folder, options.activation)
    for line in captured.warnings:
        progress.say(line)
    facts, graph_module = captured.facts, captured.graph_module
    mixture = has_experts(graph_module)
    if mixture:
        _check_target(facts.name, options)
    quant = default_quant(options.quant, captured.weights)
    packing = _packing(options, facts.max_positions, facts.activation, quant, mixture=mixture)
    predictors = loaded if options.predictors is not None or packing.predictor == "learned" else None
    if predictors is not None:
        predictors.require_model(mark, _block_shapes(graph_module))
    _say_of_firing(facts.name, options, packing, facts.activation, progress)
    settings = ProfileOptions(activation=options.activation)
    if given is None and packing.predictor == "none" and not options.on_gpu:
        # Every neuron (of a chosen expert) is computed: a profile would tell nothing that the plan of a CPU needs.
        given = FiringSource(None)
    if given is None and packing.predictor == "none":
        progress.say("profiling how neurons fire, which takes minutes; --firing 100% plans without it")
    known = made_profile(folder, options.work, settings, progress) if given is None else nullcontext(given)
    with known as source, progress.step("count"):
        firing = source.typical(facts.layers)
        count = partial(count_bytes, facts.name, graph_module, predictors=predictors, firing=firing)
        if quant != STORED:
            model, whole = count(packing), None
        else:
            model, whole = _stored_bytes(captured, packing, count, on_gpu=options.on_gpu)
        return PlannedModel(model, model_firing(model, source, predictors), mark, facts.activation, whole)


def _check_target(name: str, options: ModelOptions) -> None:
    """Raise `UnsupportedModelError` for a mixture of experts that is planned for an accelerator."""
    if options.on_gpu:
        raise no_accelerator(name)


def _stored_bytes(
    captured: Captured, packing: Packing, count: Callable[..., ModelBytes], *, on_gpu: bool
) -> tuple[ModelBytes, ModelBytes | None]:
    """Return the bytes of a model that keeps the checkpoint's numbers, and those if a GPU computes all of its blocks.

    `count(packing, choose=…)` counts them. A block keeps its numbers if one side computes every neuron of it.
    """

    def counted(*, whole: bool) -> ModelBytes:
        def choose(graph_module: GraphModule) -> Mapping[str, str]:
            return choose_stored(captured, graph_module, hot_by_outputs=whole, on_accelerator=on_gpu).formats

        return count(replace(packing, hot_by_outputs=whole), choose=choose)

    if packing.predictor != "none":
        return counted(whole=False), None
    return (counted(whole=False), counted(whole=True)) if on_gpu else (counted(whole=True), None)


def _given(options: ModelOptions, fingerprint: str) -> FiringSource | None:
    """Return the curve or profile that was given or is in the work folder; None if a profile has to be made."""
    if options.firing is not None:
        return FiringSource(None, options.firing)
    profile = given_profile(options.profile, options.work, fingerprint)
    return None if profile is None else FiringSource(profile)


def _packing(
    options: ModelOptions, limit: object, activation: str, quant: str = DEFAULT_QUANT, *, mixture: bool = False
) -> Packing:
    """Return how the model is packed; `limit` is the number of positions in its config."""

    longest = limit if isinstance(limit, int) and limit > 0 else None
    context = resolve_context(options.context, longest)
    predictor = options.predictor
    if predictor is None:
        predictor = "learned" if options.predictors or parse_activation(activation).sparse else "none"
        if mixture and predictor == "learned" and not options.predictors:
            predictor = "exact"
    chunk = options.chunk or default_chunk(context, on_gpu=options.on_gpu)
    return Packing(
        planned_format(options.quant or quant),
        predictor,
        context,
        options.sequences,
        options.kv_dtype,
        chunk,
        predictor_quant=options.predictor_quant or "auto",
    )


def _activation(config: Mapping[str, Any]) -> str:
    """Return the dialect's text for the activation of a config; transformers is asked where it names none."""
    family = find_family(config)
    if family.is_known and (family.fixed_activation is not None or family.activation in config):
        return activation_text(config, family, "")

    layers = _layers(config)
    from picompile.frontend.hf import activation_of

    return activation_of(shortened(config, layers, min(layers, 2)))


def _layers(config: Mapping[str, Any]) -> int:
    """Return the number of layers in a config, 1 where it is wrong: counting the model's bytes checks it later."""
    layers = config.get("num_hidden_layers")
    return layers if type(layers) is int and 0 < layers < MOST_LAYERS else 1


def _load_predictors(folder: Path, options: ModelOptions) -> Predictors | None:
    """Return the predictors that were given, or that compile would take: from its work folder, or beside the model."""
    if options.predictors is not None:
        return load_predictors(options.predictors)
    if options.predictor not in (None, "learned"):
        return None
    if options.work is not None and (options.work / "predictors" / "predictors.json").is_file():
        return load_predictors(options.work / "predictors")
    beside = (folder.parent if folder.is_file() else folder) / "predictors.safetensors"
    return load_predictors(beside) if beside.is_file() else None


def _block_shapes(graph_module: GraphModule) -> dict[int, BlockShape]:

    return block_shapes(canonicalize(graph_module))
