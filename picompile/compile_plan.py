"""The plan that a compilation splits blocks by: the one that was given, held against the model, or one that is made."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from picompile.compile_options import CompileOptions
from picompile.errors import UsageError
from picompile.machine import Target, gpu_of
from picompile.progress import Progress

if TYPE_CHECKING:
    from picompile.artifact.writer import Source
    from picompile.frontend.captured import ModelFacts
    from picompile.placement.model_bytes import ModelBytes
    from picompile.placement.plan import Plan
    from picompile.placement.planning import PlanOptions
    from picompile.placement.sources import FiringSource
    from picompile.predictors import Predictors
    from picompile.predictors.predictor_set import PredictorSet


def check_plan_model(plan: "Plan", folder: Path) -> None:
    """Raises `UsageError` for a plan of another checkpoint than `folder`."""
    from picompile.frontend.checkpoint import fingerprint

    if plan.fingerprint != fingerprint(folder):
        raise UsageError(f"the plan is of another model ({plan.model!r}) than {folder}; plan this one")


def check_profile(profile: Path, folder: Path) -> None:
    """Raises `UsageError` for a profile of another checkpoint than `folder`, or none at all."""
    from picompile.frontend.checkpoint import fingerprint
    from picompile.placement.sources import given_profile

    given_profile(profile, None, fingerprint(folder))


def check_plan(plan: "Plan", source: "Source", options: CompileOptions, progress: Progress) -> None:
    """Says where `plan` is not for what is compiled. Raises `UsageError` for other layers than the model's."""
    facts = source.captured.facts
    neurons = {layer.neurons for layer in plan.layers}
    if len(plan.layers) != facts.layers or neurons != {facts.ffn}:
        found = f"{len(plan.layers)} layers of {', '.join(map(str, sorted(neurons)))} neurons"
        raise UsageError(f"the plan is of {found}, but the model has {facts.layers} of {facts.ffn}; plan this one")
    for what, planned, compiled in (
        ("weights in", plan.quant, options.quant),
        ("a context of", plan.context, source.context),
        ("predictor", plan.predictor, _predictor(options, facts)),
        ("a batch of", plan.batch, options.sequences),
    ):
        if planned != compiled:
            progress.say(f"the plan is for {what} {planned}, but this compiles for {compiled}; its figures do not hold")


def find_plan(
    source: "Source", prediction: "PredictorSet | None", options: CompileOptions, progress: Progress
) -> "Plan | None":
    """The plan that was given, or one for the target's GPU where it is left to the compiler what is hot; else None.

    Where all neurons fit that GPU they are hot, and nothing is profiled. Raises `DoesNotFitError`, `UsageError` for a
    profile of another model or one that cannot be made, and what profiling raises.
    """
    gpu = gpu_of(options.target)
    if not options.makes_plan or gpu is None:
        return options.plan
    from picompile.placement.planning import make_plan, whole_plan

    settings = _settings(gpu, source, options, progress)
    predictors = None if prediction is None or prediction.kind != "learned" else prediction.predictors
    with progress.step("plan"):
        model = _count(source, predictors, options)
        plan = whole_plan(model, settings)
    if plan is not None:
        return plan
    from picompile.placement.sources import planned_model

    with _firing(source, prediction, options, progress) as firing, progress.step("plan"):
        planned = planned_model(model, firing, predictors, settings.fingerprint)
        return make_plan(planned.model, planned.firing, settings)


def _settings(gpu: Target, source: "Source", options: CompileOptions, progress: Progress) -> "PlanOptions":
    from picompile.frontend.checkpoint import fingerprint
    from picompile.placement.machine import find_machine
    from picompile.placement.planning import PlanOptions

    machine = find_machine(options.machine(gpu))
    if machine.warning is not None:
        progress.say(machine.warning)
    mark = None if source.folder is None else fingerprint(source.folder)
    return PlanOptions(gpu.name, machine.machine, fingerprint=mark)


def _count(source: "Source", predictors: "Predictors | None", options: CompileOptions) -> "ModelBytes":
    from picompile.placement.counting import Packing, count_bytes

    captured = source.captured
    predictor = _predictor(options, captured.facts)
    packing = Packing(options.quant, predictor, source.context, options.sequences, options.kv_dtype, options.chunk)
    return count_bytes(captured.facts.name, captured.graph_module, packing, predictors)


def _predictor(options: CompileOptions, facts: "ModelFacts") -> str:
    """The kind that is compiled."""
    from picompile_passes.dialect.activations import parse_activation

    return options.predictor or ("exact" if parse_activation(facts.activation).sparse else "none")


@contextmanager
def _firing(
    source: "Source", prediction: "PredictorSet | None", options: CompileOptions, progress: Progress
) -> "Iterator[FiringSource]":
    """From the profile that predictors were trained on, one that was given or is in the work folder, or one made."""
    from picompile.frontend.checkpoint import fingerprint
    from picompile.placement.sources import NOT_KEPT, FiringSource, given_profile, made_profile
    from picompile.predictors.profile import ProfileOptions

    if source.folder is None:
        raise UsageError(
            "the model does not fit the GPU altogether, and of a module in memory there is no profile that says which "
            "neurons are hot; compile a model folder, or say which with hot or plan"
        )
    if prediction is not None and prediction.profile is not None:
        is_kept = options.profile is not None or options.work is not None
        yield FiringSource(prediction.profile, source=None if is_kept else NOT_KEPT)
        return
    given = given_profile(options.profile, options.work, fingerprint(source.folder))
    if given is not None:
        yield FiringSource(given)
        return
    settings = ProfileOptions(calibration=options.calibration)
    with made_profile(source.folder, options.work, settings, progress) as made:
        yield made
