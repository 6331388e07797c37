"""The driver's loop: its steps in order, until the artifact meets its accuracy bounds."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from torch.fx import GraphModule

from picompile.artifact.code import AcceleratorTarget, Code, accelerator_target, planned_code
from picompile.artifact.writer import (
    ArtifactContents,
    MeasuredAccuracy,
    WrittenArtifact,
    make_room,
    record_accuracy,
    write_artifact,
)
from picompile.choices import STORED, base_format
from picompile.compile.accuracy import check_accuracy, require_checkable
from picompile.compile.bf16 import choose_bf16
from picompile.compile.checked import ModelChecks, takes_long
from picompile.compile.comparison import compare_artifact
from picompile.compile.lower import lower_for, warn_if_large
from picompile.compile.mixtures import check_config, check_mixture
from picompile.compile.passes import compilation_passes, pipeline_passes, quantize_pass, run_passes
from picompile.compile.plan import check_checkpoint, check_given_plan, place_neurons
from picompile.compile.structure.keep import keep_structure
from picompile.compile.structure.key import StructureKey, structure_key
from picompile.compile.weights import choose_formats, choose_limits, round_weights, warn_of_rounding
from picompile.config import CompileConfig, CompileOptions, cache_context, resolve
from picompile.errors import AccuracyError, UsageError
from picompile.frontend.captured import Captured
from picompile.frontend.generation_config import check_generation_config
from picompile.frontend.hf import load_model, open_checkpoint
from picompile.frontend.stored.choice import default_quant
from picompile.frontend.tokenizer_files import TokenizerFiles
from picompile.output import OutputPath
from picompile.placement.plan import Plan
from picompile.predictors.accuracy import AccuracyReport
from picompile.predictors.predictor_set import PredictorSet, obtain_predictors
from picompile.predictors.profile.text import read_calibration
from picompile.processes import seldom_collected
from picompile.products import fast_products
from picompile.progress import Noting, Progress
from picompile_codegen.lowering.lower import Lowered
from picompile_passes.graph.materialize import WeightSource


def compile_in_steps(
    place: OutputPath,
    model: str | os.PathLike[str] | Captured,
    options: CompileOptions,
    key: StructureKey | None,
    progress: Progress,
) -> AccuracyReport | None:
    """Compile a model in all steps into the artifact at `place`, as `compile_model` says.

    What of it does not depend on the values of weights is kept by `key`, unless that is None.
    """
    options = _with_texts(options)
    code, accelerator = _check_before_capture(model, options)
    return _compile_into(place, model, options, code, accelerator, progress, key)


@seldom_collected()
@fast_products()
def _compile_into(
    place: OutputPath,
    model: str | os.PathLike[str] | Captured,
    options: CompileOptions,
    code: Sequence[Code],
    accelerator: AcceleratorTarget | None,
    progress: Progress,
    key: StructureKey | None,
) -> AccuracyReport | None:
    """Capture the model, compile it, and publish the artifact at `place`."""
    checkpoint, captured = _capture(model, options, progress)
    check_mixture(captured, options)
    checks = ModelChecks(checkpoint, captured, options, progress)
    try:
        with place.scratch() as scratch:
            source = _source(checkpoint, captured, checks, options, progress)
            source = replace(source, code=code, accelerator=accelerator)
            noting = Noting(progress)
            artifact, report = _compile(source, place.path, scratch, noting)
            if key is not None and structure_key(model, options) == key:
                keep_structure(key, artifact, noting.said)
            place.publish(artifact.folder)
    except Exception:
        # What is wrong with the model itself is said first.
        checks()
        raise
    return report


def _source(
    checkpoint: Path | None, captured: Captured, checks: ModelChecks, options: CompileOptions, progress: Progress
) -> "_Source":
    """Return the model with its config. It is checked at once where the steps before its kernels take long."""
    quant = default_quant(options.quant, captured.weights, calibrated=options.rounding == "calibrated")
    if takes_long(options, quant):
        checks()
    config = resolve(options, captured.facts, quant)
    if checkpoint is None:
        # A module has no tokenizer, so its weights are not rounded for a text, and the report must not say so.
        config = replace(config, rounding="nearest")
    if config.quant != STORED:
        by_neurons = config.predictor != "none" or config.back_end is not None or bool(config.hot)
        warn_of_rounding(captured, base_format(config.quant), progress, by_neurons=by_neurons)
    check_given_plan(config, captured.facts, progress)
    return _Source(checkpoint, captured, checks, config)


def _with_texts(options: CompileOptions) -> CompileOptions:
    """Return the options with standard input read, where it is a text: several steps read texts, and it only once."""
    if Path("-") not in options.calibration:
        return options
    return replace(options, calibration=read_calibration(options.calibration))


@dataclass(frozen=True)
class _Source:
    """A model and what it is compiled for.

    `checkpoint` is the model's folder, None for a module in memory, and `checks` give its tokenizer.
    """

    checkpoint: Path | None
    captured: Captured
    checks: ModelChecks
    config: CompileConfig
    code: Sequence[Code] = ()
    accelerator: AcceleratorTarget | None = None


def _compile(
    source: _Source, output: Path, scratch: Path, progress: Progress
) -> tuple[WrittenArtifact, AccuracyReport | None]:
    """Return an artifact in the folder `scratch` that meets its accuracy bounds, and its report if it was checked.

    Raises `AccuracyError` where it does not meet that on its predictors, and there are no larger ones to try, or where
    it does not meet that on its distance from the checkpoint.
    """
    captured, config = source.captured, source.config
    predictors = obtain_predictors(source.checkpoint, captured, scratch, config, progress)
    config, captured = choose_limits(source.checkpoint, captured, config, predictors, scratch, progress)
    config, predicted = choose_formats(source.checkpoint, captured, config, predictors, scratch, progress)
    source = replace(source, captured=captured, config=config)
    # Once: larger predictors, if these fall short, hardly change what the weights are rounded for.
    weights = round_weights(source.checkpoint, captured, config, predictors, scratch, progress)
    previous: WrittenArtifact | None = None
    for attempt in count():
        plan = place_neurons(config, captured, source.checkpoint, predictors, progress)
        if predicted is not None and attempt == 0 and plan is config.plan and config.dump_ir is None:
            # All passes but the last one have run.
            begun, passes = replace(captured, graph_module=predicted), [quantize_pass(config)]
        else:
            begun, passes = captured, compilation_passes(config, captured.facts, predictors, plan)
        graph_module = run_passes(begun, passes, progress, config.dump_ir, verify=config.verify)
        lowered = lower_for(graph_module, captured.facts, plan, config, source.accelerator, progress)
        warn_if_large(lowered.program, progress)
        contents = _contents(source, graph_module, lowered, base=weights, predictors=predictors, plan=plan)
        previous = make_room(output, lowered, previous)
        folder = scratch / f"artifact-{attempt}"
        artifact = write_artifact(contents, folder, progress, previous, tokenizer=source.checks)
        if previous is not None:
            shutil.rmtree(previous.folder)
        report = None
        if predictors is not None and config.is_checked:
            report = check_accuracy(artifact, predictors, plan, config, progress)
        if predictors is None or report is None or report.met:
            break
        larger = predictors.choose_larger(report.worst_layers)
        if larger is None:
            raise AccuracyError(report.refusal, report.worst_layers)
        progress.say(f"{report.refusal}; trying larger predictors there")
        predictors, previous = larger, artifact
    artifact, bf16 = choose_bf16(artifact, predictors, config, progress)
    comparison = compare_artifact(artifact, predictors, plan, config, progress)
    if comparison is not None and not comparison.met:
        raise AccuracyError(comparison.refusal)
    measured = [None if each is None else each.to_json() for each in (report, comparison, bf16)]
    if any(each is not None for each in measured) or artifact.contents.code is not source.code:
        record_accuracy(artifact, MeasuredAccuracy(*measured))
    return artifact, report


def _check_before_capture(
    model: str | os.PathLike[str] | Captured, options: CompileOptions
) -> tuple[Sequence[Code], AcceleratorTarget | None]:
    """Return the code to make. Raise for what can be refused at once; capturing a model takes longer."""
    if options.activation is not None and not isinstance(model, str | os.PathLike):
        raise UsageError(
            "activation applies to a model folder or a GGUF file; a module in memory computes its own; leave it out"
        )
    pipeline_passes(options)
    check_config(model, options)
    # The code of an accelerator on the CPU has the instruction sets of the host's, which the check may not change.
    bf16 = options.bf16 != "off" and options.quant == "f16" and options.back_end is None
    code = planned_code(options.target, bf16=bf16)
    accelerator = accelerator_target(options.back_end, options.target)
    if options.checkpoint_bound is not None and not isinstance(model, str | os.PathLike):
        raise UsageError(
            "checkpoint_bound compares with a model folder or a GGUF file, not with a module in memory; leave it out"
        )
    require_checkable(options, code)
    if isinstance(model, str | os.PathLike):
        check_checkpoint(options, Path(model))
        if options.context is not None:
            cache_context(options, open_checkpoint(Path(model), options.activation).facts)
    return code, accelerator


def _capture(
    model: str | os.PathLike[str] | Captured, options: CompileOptions, progress: Progress
) -> tuple[Path | None, Captured]:
    """Return the checkpoint folder, None for a module in memory, and the captured model."""
    if not isinstance(model, str | os.PathLike):
        return None, model
    unread = check_generation_config(Path(model))
    if unread is not None:
        progress.say(unread)
    with progress.step("capture"):
        captured = load_model(Path(model), options.activation)
    for line in captured.warnings:
        progress.say(line)
    return Path(model), captured


def _contents(
    source: _Source,
    graph_module: GraphModule,
    lowered: Lowered,
    base: WeightSource,
    predictors: PredictorSet | None,
    plan: Plan | None,
) -> ArtifactContents:
    return ArtifactContents(
        source.captured,
        source.checkpoint,
        TokenizerFiles(),
        targets=source.config.target,
        quant=source.config.quant,
        code=source.code,
        accelerator=source.accelerator,
        graph_module=graph_module,
        lowered=lowered,
        weights=base if predictors is None else predictors.weights(base),
        plan=None if plan is None else plan.to_json(),
        skipping=None if source.config.limits is None else source.config.limits.to_json(),
        rounding=source.config.rounding_json(),
    )
