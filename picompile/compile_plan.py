"""The plan that a compilation splits blocks by: the one that was given, held against the model, or one that is made."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from picompile.config import CompileConfig, CompileOptions
from picompile.errors import UsageError
from picompile.progress import Progress

if TYPE_CHECKING:
    from picompile.frontend import Captured
    from picompile.frontend.captured import ModelFacts
    from picompile.placement.machine import MachineOptions
    from picompile.placement.model_bytes import ModelBytes
    from picompile.placement.plan import Plan
    from picompile.placement.planning import PlanOptions
    from picompile.placement.sources import FiringSource
    from picompile.predictors import Predictors
    from picompile.predictors.predictor_set import PredictorSet


def check_checkpoint(options: CompileOptions, checkpoint: Path) -> None:
    """Raise `UsageError` for a plan, or a profile to plan with, of another checkpoint than the folder `checkpoint`."""
    from picompile.frontend.checkpoint import fingerprint
    from picompile.placement.sources import given_profile

    plan = options.plan
    if plan is not None and plan.fingerprint != fingerprint(checkpoint):
        raise UsageError(f"the plan is of another model ({plan.model!r}) than {checkpoint}; plan this one")
    if options.makes_plan and options.profile is not None:
        given_profile(options.profile, None, fingerprint(checkpoint))


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
        ("a number of sequences of", plan.batch, config.sequences),
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
    from picompile.placement.planning import make_plan, whole_plan
    from picompile.placement.sources import planned_model

    settings = _plan_options(config.placement.machine, checkpoint, progress)
    learned = None if predictors is None or predictors.kind != "learned" else predictors.predictors
    with progress.step("plan"):
        model = _count(config, captured, learned)
        plan = whole_plan(model, settings)
    if plan is not None:
        return plan
    with _firing(config, checkpoint, predictors, progress) as firing, progress.step("plan"):
        planned = planned_model(model, firing, learned, settings.fingerprint)
        return make_plan(planned.model, planned.firing, settings)


def _plan_options(machine: "MachineOptions", checkpoint: Path | None, progress: Progress) -> "PlanOptions":
    from picompile.frontend.checkpoint import fingerprint
    from picompile.placement.machine import find_machine
    from picompile.placement.planning import PlanOptions

    found = find_machine(machine)
    if found.warning is not None:
        progress.say(found.warning)
    mark = None if checkpoint is None else fingerprint(checkpoint)
    return PlanOptions(machine.target, found.machine, fingerprint=mark)


def _count(config: CompileConfig, captured: "Captured", predictors: "Predictors | None") -> "ModelBytes":
    from picompile.placement.counting import count_bytes
    from picompile.placement.packing import Packing

    packing = Packing(
        config.quant, config.predictor.kind, config.context, config.sequences, config.kv_dtype, config.chunk
    )
    return count_bytes(captured.facts.name, captured.graph_module, packing, predictors)


@contextmanager
def _firing(
    config: CompileConfig, checkpoint: Path | None, predictors: "PredictorSet | None", progress: Progress
) -> "Iterator[FiringSource]":
    """Give the profile that predictors were trained on, one that was given or is in the work folder, or one made."""
    from picompile.frontend.checkpoint import fingerprint
    from picompile.placement.sources import NOT_KEPT, FiringSource, given_profile, made_profile
    from picompile.predictors.profile import ProfileOptions

    if checkpoint is None:
        raise UsageError(
            "the model does not fit the GPU altogether, and of a module in memory there is no profile that says which "
            "neurons are hot; compile a model folder, or say which with hot or plan"
        )
    profile, work = config.predictor.profile, config.predictor.work
    if predictors is not None and predictors.profile is not None:
        is_kept = profile is not None or work is not None
        yield FiringSource(predictors.profile, source=None if is_kept else NOT_KEPT)
        return
    given = given_profile(profile, work, fingerprint(checkpoint))
    if given is not None:
        yield FiringSource(given)
        return
    settings = ProfileOptions(calibration=config.predictor.calibration)
    with made_profile(checkpoint, work, settings, progress) as made:
        yield made
