"""The driver's steps that depend on the config: its plan, its passes, its lowering, its accuracy check."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from picompile.artifact.code import Code, build_code, native_code, runs_here
from picompile.artifact.writer import WrittenArtifact, write_program
from picompile.choices import KV_DTYPES, base_format, is_budget, parse_bits
from picompile.config import CompileConfig, CompileOptions, cache_text, predictor_quant
from picompile.errors import UsageError
from picompile.progress import Progress
from picompile.steps import lower_graph, run_passes

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from picompile.artifact.code import AcceleratorTarget
    from picompile.frontend import Captured
    from picompile.frontend.captured import ModelFacts
    from picompile.placement.machine import MachineOptions
    from picompile.placement.model_bytes import ModelBytes
    from picompile.placement.plan import Plan
    from picompile.placement.planning import PlanOptions
    from picompile.placement.sources import FiringSource
    from picompile.predictors import Predictors
    from picompile.predictors.accuracy import AccuracyReport
    from picompile.predictors.predictor_set import PredictorSet
    from picompile.rounding import RoundingOptions
    from picompile_codegen.lowering.lower import Lowered
    from picompile_codegen.lowering.placement import Placement
    from picompile_codegen.lowering.program import LoweredProgram
    from picompile_passes.base import Pass, Stage
    from picompile_passes.graph.materialize import WeightSource
    from picompile_passes.passes.insert_predictors import InsertPredictors


# Lowering: the program that a config asks for, and a warning where it is too large for this machine.


def lower_for(
    graph_module: "GraphModule",
    facts: "ModelFacts",
    plan: "Plan | None",
    config: CompileConfig,
    accelerator: "AcceleratorTarget | None",
    progress: Progress,
    *,
    panels: bool = True,
) -> "Lowered":
    """Return the program of a quantized graph for the host and `accelerator`, or for the host alone where it is None.

    Args:
        graph_module: the graph.
        facts: of its model.
        plan: says what runs on the accelerator; without one, all that can.
        config: what the model is compiled for.
        accelerator: the accelerator that kernels are made for.
        progress: is told of the step.
        panels: whether weights may lie in panels; not where the host is to read those of a GPU.
    """
    from picompile_codegen.lowering.function import LowerOptions

    options = LowerOptions(
        config.context,
        config.chunk,
        KV_DTYPES[config.kv_dtype],
        config.sequences,
        None if accelerator is None else accelerator.kind,
        _placement(plan, facts.layers),
        scores_masks=True,
        draft_tokens=config.draft_tokens,
        panels=panels,
    )
    return lower_graph(graph_module, options, progress)


def _placement(plan: "Plan | None", layers: int) -> "Placement":
    """Return what of a model runs on the accelerator beside hot neurons: what the plan says, or all that can."""
    from picompile_codegen.lowering.placement import Placement

    if plan is None:
        return Placement.all_of(layers)
    return Placement(
        attention=frozenset(each.layer for each in plan.layers if each.attention == "gpu"),
        caches=frozenset(each.layer for each in plan.layers if each.kv_cache == "gpu"),
        predictors=frozenset(each.layer for each in plan.layers if each.predictor == "gpu"),
        head=plan.head == "gpu",
    )


def warn_if_large(program: "LoweredProgram", progress: Progress) -> None:
    """Tell `progress` if this machine's memory cannot hold the cache; the artifact may be for another machine."""
    from picompile.machine.host import host_memory
    from picompile_runtime.devices.memory import in_units

    total_bytes, _ = host_memory()
    if program.state_bytes > total_bytes:
        needed, there = in_units(program.state_bytes, total_bytes)
        progress.say(
            f"{cache_text(program.sequences, program.context)} takes {needed}, more than this machine's {there}: the "
            "artifact will not load here"
        )


def warn_of_rounding(captured: "Captured", quant: str, progress: Progress) -> None:
    """Tell `progress` if most weights are of few bits already, and `quant` rounds them a second time."""
    rounds_again: Callable[[str], str | None] | None = getattr(captured.weights, "rounds_again", None)
    stored = None if rounds_again is None else rounds_again(quant)
    if stored is not None:
        better = "--quant q4m or q8 keeps them closer to what they are"
        progress.say(f"most weights of the model are {stored}, which {quant} rounds a second time; {better}")


# Rounding: weights are rounded once, before a plan tells which neurons are where.


def round_weights(
    checkpoint: Path | None,
    captured: "Captured",
    config: CompileConfig,
    predictors: "PredictorSet | None",
    scratch: Path,
    progress: Progress,
) -> "WeightSource":
    """Return the weights of the model, with matrices rounded for the calibration text where `config` asks for that.

    Args:
        checkpoint: the model's folder or file, None for a module in memory, which has no tokenizer for a text.
        captured: the model.
        config: what the model is compiled for.
        predictors: its lossy predictors, which decide what down gets; None where the predictor is lossless.
        scratch: a folder for what is not kept.
        progress: is told of each step.

    Raises:
        UsageError: the text cannot be used.
        UnsupportedModelError: the model's values are not finite numbers.
    """
    base = captured.weights
    if not config.rounding.compensates or checkpoint is None:
        return base
    from picompile.rounding import round_checkpoint

    passes = _all_passes(_insert_passes(config, predictors), {}, _quantize_pass(config), config.debug.passes)
    graph_module = run_passes(captured, passes, progress, verify=config.debug.verify)
    weights = base if predictors is None else predictors.weights(base)
    folder = (config.rounding.work or scratch / "work") / "rounding"
    return round_checkpoint(checkpoint, graph_module, weights, folder, _rounding_options(config), progress).onto(base)


def _rounding_options(config: CompileConfig) -> "RoundingOptions":
    from picompile.rounding import RoundingOptions

    rounding = config.rounding
    return RoundingOptions(rounding.calibration, rounding.tokens, activation=rounding.activation)


def _exact_tables(captured: "Captured", quant: str) -> dict[str, str]:
    """Return `quant` by the name of each matrix with a row for each token that the weights have in this format."""
    from picompile_passes.weight_formats import head_format

    weights, vocab = captured.weights, captured.facts.vocab
    packed: Callable[[str, str], object] | None = getattr(weights, "packed", None)
    if packed is None or head_format(quant) == quant:
        return {}
    tables = [name for name in weights.names() if len(weights.shape(name)) == 2 and weights.shape(name)[0] == vocab]
    return {name: quant for name in tables if packed(name, quant) is not None}


def choose_limits(
    checkpoint: Path | None,
    captured: "Captured",
    config: CompileConfig,
    predictors: "PredictorSet | None",
    scratch: Path,
    progress: Progress,
) -> "tuple[CompileConfig, Captured]":
    """Return `config` and the model with the limits below which it leaves out neurons, where `config` asks for them.

    The arguments are those of `round_weights`.

    Raises:
        UsageError: the text cannot be used, the model is a module in memory, or nothing of it can be skipped.
        UnsupportedModelError: the model's logits are not finite numbers.
    """
    skipping = config.skipping
    if skipping is None:
        return config, captured
    if checkpoint is None:
        raise UsageError("skip needs a model folder, whose tokenizer reads text; leave it out")
    from picompile.skipping import checkpoint_limits, skipping_sites
    from picompile_passes.passes.canonicalize import CANONICALIZE

    canonical = run_passes(captured, CANONICALIZE, progress, verify=config.debug.verify)
    sites = skipping_sites(canonical, skipping.sites)
    insert = sites.passes(_insert_pass(config, predictors))
    graph_module = run_passes(replace(captured, graph_module=canonical), insert, progress, verify=config.debug.verify)
    weights = captured.weights if predictors is None else predictors.weights(captured.weights)
    folder = (skipping.work or scratch / "work") / "skipping"
    found = checkpoint_limits(checkpoint, graph_module, weights, folder, skipping.options, progress)
    limited = replace(captured, weights=found.limits.weights(captured.weights))
    return replace(config, limits=found), limited


def choose_formats(
    checkpoint: Path | None,
    captured: "Captured",
    config: CompileConfig,
    predictors: "PredictorSet | None",
    scratch: Path,
    progress: Progress,
) -> CompileConfig:
    """Return `config` with a format for each matrix, where it has a budget of bits for them.

    Where it has none, a head or a table that the checkpoint holds in the model's format already keeps it, and is not
    rounded to the format of heads. The arguments are those of `round_weights`.

    Raises:
        UsageError: the text cannot be used, or the model is a module in memory, which has no tokenizer for one.
    """
    if not is_budget(config.quant):
        return replace(config, tensors=_exact_tables(captured, config.quant))
    if checkpoint is None:
        raise UsageError(f"quant {config.quant} needs a model folder, whose tokenizer reads text; choose a format")
    from picompile.rounding import checkpoint_formats

    quantize = _quantize_pass(config)
    passes = _all_passes(_insert_passes(config, predictors), {}, quantize, config.debug.passes)
    # Extra passes may come behind quantization: losses are measured on the graph before it.
    passes = passes[: passes.index(quantize)]
    graph_module = run_passes(captured, passes, progress, verify=config.debug.verify)
    weights = captured.weights if predictors is None else predictors.weights(captured.weights)
    folder = (config.rounding.work or scratch / "work") / "bits"
    chosen = checkpoint_formats(
        checkpoint, graph_module, weights, folder, _rounding_options(config), parse_bits(config.quant), progress
    )
    rounding = replace(config.rounding, bits_per_weight=chosen.bits_per_weight, loss_nats=chosen.loss_nats)
    return replace(config, tensors=chosen.formats, rounding=rounding)


# Passes: the ones from captured to quantized, with the extra ones that the user asks for.


def pipeline_passes(options: CompileOptions, insert: "Pass | None" = None) -> "list[Pass]":
    """Return the passes from captured to quantized that `options` ask for, in order.

    The model is not known here: hot neurons are those that a plan or `hot` names.

    Args:
        options: what to compile for.
        insert: the pass that inserts predictors; by default `InsertPredictors` of a lossless kind.

    Raises:
        RegistryError, PassOptionError, UsageError: an extra pass, one of its options or its stage is not known.
    """
    from picompile_passes.passes.insert_predictors import InsertPredictors
    from picompile_passes.passes.quantize import Quantize

    kind = str(options.predictor) if options.predictor is not None and options.is_lossless else "auto"
    hot = options.plan.hot_neurons() if options.plan is not None else dict(options.hot or {})
    quantize = Quantize(base_format(options.quant), predictor_quant(options))
    return _all_passes([insert or InsertPredictors(kind)], hot, quantize, options.passes)


def compilation_passes(
    config: CompileConfig, facts: "ModelFacts", predictors: "PredictorSet | None", plan: "Plan | None"
) -> "list[Pass]":
    """Return the passes from captured to quantized of one compilation, in order.

    Args:
        config: what the model is compiled for.
        facts: of the model.
        predictors: the lossy predictors to insert, None where the predictor is lossless.
        plan: says which neurons are hot. Without one, `config` names them, and if there is an accelerator, all neurons
            of layers that it does not name are hot.
    """
    insert = _insert_passes(config, predictors)
    return _all_passes(insert, _hot_neurons(config, facts, plan), _quantize_pass(config), config.debug.passes)


def _quantize_pass(config: CompileConfig) -> "Pass":
    """Return the pass that packs matrices in the formats of `config`."""
    from picompile_passes.passes.quantize import Quantize

    return Quantize(base_format(config.quant), config.predictor_quant, tensors=config.tensors)


def _insert_pass(config: CompileConfig, predictors: "PredictorSet | None") -> "InsertPredictors":
    """Return the pass that inserts predictors: the lossy ones, or those of the config's lossless kind."""
    from picompile_passes.passes.insert_predictors import InsertPredictors

    return InsertPredictors(config.predictor.insert_kind) if predictors is None else predictors.insert_pass()


def _insert_passes(config: CompileConfig, predictors: "PredictorSet | None") -> "list[Pass]":
    """Return the passes that insert predictors, and limits where these are known."""
    insert = _insert_pass(config, predictors)
    return [insert] if config.limits is None else config.limits.limits.sites.passes(insert)


def _all_passes(
    insert: "Sequence[Pass]", hot: Mapping[int, Sequence[int]], quantize: "Pass", extra: Sequence[str]
) -> "list[Pass]":
    from picompile_passes.passes.canonicalize import CANONICALIZE
    from picompile_passes.passes.partition import Partition
    from picompile_passes.registry import make_pass

    named = [_parse_pass(text) for text in extra]
    return _insert_extra(
        [*CANONICALIZE, *insert, Partition(hot), quantize], [(make_pass(name), stage) for name, stage in named]
    )


def _hot_neurons(config: CompileConfig, facts: "ModelFacts", plan: "Plan | None") -> Mapping[int, Sequence[int]]:
    """Return the neurons of each layer's hot part."""
    if plan is not None:
        return plan.hot_neurons()
    hot = dict(config.placement.hot or {})
    if config.placement.accelerator is None:
        return hot
    return {layer: hot.get(layer, range(facts.ffn)) for layer in range(facts.layers)} | hot


def _parse_pass(text: str) -> "tuple[str, Stage | None]":
    """Return the pass and the stage that `name{option=value}@stage` names; None for a stage that is left out."""
    from picompile_passes.base import Stage

    name, at, stage = text.rpartition("@")
    # An option may hold an @ too.
    if not at or "}" in stage:
        return text, None
    known = {each.text: each for each in Stage}
    if stage not in known:
        raise UsageError(f"--pass {text}: {stage!r} is no stage; the stages are {', '.join(known)}")
    return name, known[stage]


def _insert_extra(own: "Sequence[Pass]", extra: "Sequence[tuple[Pass, Stage | None]]") -> "list[Pass]":
    """Return `own` passes, with each of the `extra` ones where its stage, or else the one it requires, is reached."""
    from picompile_passes.base import Stage

    ordered, reached = [], min(Stage)
    waiting = [(pass_, pass_.requires if stage is None else max(stage, pass_.requires)) for pass_, stage in extra]
    for pass_ in own:
        ordered += [other for other, stage in waiting if stage <= reached]
        waiting = [(other, stage) for other, stage in waiting if stage > reached]
        ordered.append(pass_)
        reached = max(reached, pass_.ensures or reached)
    return [*ordered, *(other for other, _ in waiting)]


# Plan: a given plan is checked against the model; without one, a plan is made.


def check_checkpoint(options: CompileOptions, checkpoint: Path) -> None:
    """Raise `UsageError` for a plan, or a profile to plan with, of another checkpoint than the folder `checkpoint`."""
    from picompile.frontend.checkpoint import fingerprint
    from picompile.placement.sources import given_profile

    plan = options.plan
    if plan is not None and plan.fingerprint != fingerprint(checkpoint, options.activation):
        raise UsageError(f"the plan is of another model ({plan.model!r}) than {checkpoint}; plan this one")
    if options.makes_plan and options.profile is not None:
        given_profile(options.profile, None, fingerprint(checkpoint, options.activation))


def check_given_plan(config: CompileConfig, facts: "ModelFacts", progress: Progress) -> None:
    """Tell `progress` where the plan that was given, if any, is for something else than `config`.

    Raises:
        UsageError: the plan has other layers than the model that `facts` are about.
    """
    plan = config.placement.plan
    if plan is None:
        return
    neurons = {layer.neurons for layer in plan.layers}
    if len(plan.layers) != facts.layers or neurons != {facts.ffn}:
        found = f"{len(plan.layers)} layers of {', '.join(map(str, sorted(neurons)))} neurons"
        raise UsageError(f"the plan is of {found}, but the model has {facts.layers} of {facts.ffn}; plan this one")
    for what, planned, compiled in (
        ("weights in", plan.quant, config.quant),
        ("a context of", plan.context, config.context),
        ("predictor", plan.predictor, config.predictor.kind),
        ("predictors in", plan.predictor_quant, config.predictor_quant),
        ("a number of sequences of", plan.batch, config.sequences),
        ("chunks of", plan.chunk, config.chunk if config.placement.accelerator == "cuda" else plan.chunk),
    ):
        if planned != compiled:
            progress.say(f"the plan is for {what} {planned}, but this compiles for {compiled}; its figures do not hold")


def place_neurons(
    config: CompileConfig,
    captured: "Captured",
    checkpoint: Path | None,
    predictors: "PredictorSet | None",
    progress: Progress,
) -> "Plan | None":
    """Return the plan that was given, or make one where `config` has a machine for it; None where there is neither.

    Where all neurons fit the GPU they are hot, and nothing is profiled.

    Args:
        config: what the model is compiled for.
        captured: the model.
        checkpoint: its folder, None for a module in memory.
        predictors: the lossy predictors, which take memory; None where the predictor is lossless.
        progress: is told of each step.

    Raises:
        DoesNotFitError: the model does not fit the machine.
        UsageError: the profile is of another model, or none can be made.
    """
    if config.placement.machine is None:
        return config.placement.plan
    from picompile.frontend.checkpoint import fingerprint
    from picompile.placement.planning import make_plan, whole_plan
    from picompile.placement.sources import model_firing

    mark = None if checkpoint is None else fingerprint(checkpoint, config.predictor.activation)
    settings = _plan_options(config.placement.machine, mark, progress)
    learned = None if predictors is None or predictors.kind != "learned" else predictors.predictors
    with progress.step("plan"):
        model = _count_model(config, captured, learned)
        plan = whole_plan(model, settings)
    if plan is not None:
        return plan
    with _firing_source(config, checkpoint, predictors, progress) as source, progress.step("plan"):
        return make_plan(model, model_firing(model, source, learned), settings)


def _plan_options(machine: "MachineOptions", mark: str | None, progress: Progress) -> "PlanOptions":
    """Return the options of a plan for `machine`; `mark` is the model's fingerprint, None for a module in memory."""
    from picompile.placement.machine import find_machine
    from picompile.placement.planning import PlanOptions

    found = find_machine(machine)
    if found.warning is not None:
        progress.say(found.warning)
    return PlanOptions(machine.target, found.machine, fingerprint=mark)


def _count_model(config: CompileConfig, captured: "Captured", predictors: "Predictors | None") -> "ModelBytes":
    from picompile.placement.counting import count_bytes
    from picompile.placement.model_bytes import Packing

    packing = Packing(
        base_format(config.quant),
        config.predictor.kind,
        config.context,
        config.sequences,
        config.kv_dtype,
        config.chunk,
        config.tensors,
        config.predictor_quant,
    )
    return count_bytes(captured.facts.name, captured.graph_module, packing, predictors)


def _firing_source(
    config: CompileConfig, checkpoint: Path | None, predictors: "PredictorSet | None", progress: Progress
) -> "AbstractContextManager[FiringSource]":
    """Return the profile that predictors were trained on, else one that is given or in the work folder, else make one.

    A profile that is not kept is deleted at the end of the block.
    """
    from picompile.frontend.checkpoint import fingerprint
    from picompile.placement.sources import NOT_KEPT, FiringSource, given_profile, made_profile
    from picompile.predictors.profile import ProfileOptions

    if checkpoint is None:
        raise UsageError(
            "the model does not fully fit the GPU, and a module in memory has no profile to choose hot neurons "
            "by; compile a model folder, or say which with hot or plan"
        )
    profile, work, activation = config.predictor.profile, config.predictor.work, config.predictor.activation
    if predictors is not None and predictors.profile is not None:
        is_kept = profile is not None or work is not None
        return nullcontext(FiringSource(predictors.profile, source=None if is_kept else NOT_KEPT))
    given = given_profile(profile, work, fingerprint(checkpoint, activation))
    if given is not None:
        return nullcontext(FiringSource(given))
    settings = ProfileOptions(calibration=config.predictor.calibration, activation=activation)
    return made_profile(checkpoint, work, settings, progress)


# Accuracy check: the artifact that was written reads held-out text, even if this machine cannot run its code.


_STAND_IN_FILE = "kernels/gate.so"


def require_checkable(options: CompileOptions, code: "Sequence[Code]") -> None:
    """Raise `MachineError` where an accuracy check is due, and no code for it can be made for this machine."""
    is_due = (not options.is_lossless and options.gate is not None) or options.accuracy is not None
    if is_due and not runs_here(code):
        native_code(_STAND_IN_FILE)


def check_accuracy(
    artifact: WrittenArtifact,
    predictors: "PredictorSet",
    plan: "Plan | None",
    config: CompileConfig,
    progress: Progress,
) -> "AccuracyReport":
    """Return what the predictors of `artifact` cost.

    The check may overwrite the artifact's program, report and manifest with those of a stand-in.

    Write these anew with `record_accuracy` before the artifact is published.

    Code that runs on this machine is checked as it is. Otherwise a program for this machine stands in for the
    artifact's during the check: it has the same graph and the same weights, which may be large, but no accelerator. A
    GPU's results differ from those of the stand-in only by the order of additions. An artifact for a GPU is checked by
    a stand-in even if that GPU is there, so that the same inputs give the same figures and bytes on every machine.
    """
    from picompile_passes.weight_formats import predictor_format

    captured = artifact.contents.captured
    quant = predictor_format(base_format(config.quant), config.predictor_quant)
    with runnable_here(artifact, plan, config, progress) as folder:
        return predictors.check_accuracy(folder, captured, quant, config.context, config.predictor, progress)


@contextmanager
def runnable_here(
    artifact: WrittenArtifact, plan: "Plan | None", config: CompileConfig, progress: Progress
) -> Iterator[Path]:
    """Give the artifact's folder, with a program in it that runs on this machine without a GPU.

    As after `check_accuracy`, program, report and manifest may be those of a stand-in then.
    """
    contents, folder = artifact.contents, artifact.folder
    accelerator = contents.accelerator
    has_gpu = accelerator is not None and accelerator.kind == "cuda"
    if runs_here(contents.code) and not has_gpu:
        yield folder
        return
    lowered = contents.lowered
    if accelerator is not None:
        lowered = lower_for(
            contents.graph_module, contents.captured.facts, plan, config, None, progress, panels=not has_gpu
        )
    code = [native_code(_STAND_IN_FILE)]
    build_code(code, lowered, folder, progress)
    try:
        write_program(contents, lowered, folder, code, artifact.weights_sha256)
        yield folder
    finally:
        (folder / _STAND_IN_FILE).unlink()
