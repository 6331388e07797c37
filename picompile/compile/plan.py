"""The driver's plan: one that was given is checked against the model; without one, a plan is made."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from picompile.choices import planned_format
from picompile.compile.passes import hot_neurons
from picompile.config import CompileConfig, CompileOptions
from picompile.errors import DoesNotFitError, UsageError
from picompile.frontend.captured import Captured, ModelFacts
from picompile.frontend.checkpoint import fingerprint
from picompile.placement.counting import count_bytes
from picompile.placement.machine import MachineOptions, find_machine
from picompile.placement.model_bytes import ModelBytes, Packing
from picompile.placement.plan import Plan
from picompile.placement.planning import PlanOptions, make_plan, whole_plan
from picompile.placement.sources import NOT_KEPT, FiringSource, given_profile, made_profile, model_firing
from picompile.predictors.predictor_set import PredictorSet
from picompile.predictors.profile.options import ProfileOptions
from picompile.predictors.store import Predictors
from picompile.progress import NoProgress, Progress


def check_checkpoint(options: CompileOptions, checkpoint: Path) -> None:
    """Raise `UsageError` for a plan, or a profile to plan with, of another checkpoint than the folder `checkpoint`."""

    plan = options.plan
    if plan is not None and plan.fingerprint != fingerprint(checkpoint, options.activation):
        raise UsageError(f"the plan is of another model ({plan.model!r}) than {checkpoint}; plan this one")
    if options.makes_plan and options.profile is not None:
        given_profile(options.profile, None, fingerprint(checkpoint, options.activation))


def check_given_plan(config: CompileConfig, facts: ModelFacts, progress: Progress) -> None:
    """Tell `progress` where the plan that was given, if any, is for something else than `config`.

    Raises:
        UsageError: the plan has other layers than the model that `facts` are about.
    """
    plan = config.plan
    if plan is None:
        return
    neurons = {layer.neurons for layer in plan.layers}
    if len(plan.layers) != facts.layers or neurons != {facts.ffn}:
        found = f"{len(plan.layers)} layers of {', '.join(map(str, sorted(neurons)))} neurons"
        raise UsageError(f"the plan is of {found}, but the model has {facts.layers} of {facts.ffn}; plan this one")
    for what, planned, compiled in (
        ("weights in", plan.quant, planned_format(config.quant)),
        ("a context of", plan.context, config.context),
        ("predictor", plan.predictor, config.predictor),
        ("predictors in", plan.predictor_quant, config.predictor_quant),
        ("a number of sequences of", plan.sequences, config.sequences),
        ("chunks of", plan.chunk, config.chunk if config.on_gpu else plan.chunk),
    ):
        if planned != compiled:
            progress.say(f"the plan is for {what} {planned}, but this compiles for {compiled}; its figures do not hold")


def may_compute_whole_blocks(config: CompileConfig, facts: ModelFacts) -> bool:
    """Return whether an accelerator computes every neuron of all blocks, if its memory holds them."""
    if config.back_end is None or config.predictor != "none" or config.limits is not None:
        return False
    hot = hot_neurons(config, facts, config.plan)
    return len(hot) == facts.layers and all(len(neurons) == facts.ffn for neurons in hot.values())


def fits_in_whole_blocks(config: CompileConfig, captured: Captured) -> bool:
    """Return whether the memory of the accelerator that `config` plans for, if any, holds the model in its formats."""
    if config.machine is None:
        return True
    # `place_neurons` tells of warnings about the machine later, and of a model that does not fit it at all.
    settings = _plan_options(config.machine, None, NoProgress())
    try:
        return whole_plan(_count_model(config, captured, None), settings) is not None
    except DoesNotFitError:
        return False


def place_neurons(
    config: CompileConfig,
    captured: Captured,
    checkpoint: Path | None,
    predictors: PredictorSet | None,
    progress: Progress,
) -> Plan | None:
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
    if config.machine is None:
        return config.plan

    mark = None if checkpoint is None else fingerprint(checkpoint, config.activation)
    settings = _plan_options(config.machine, mark, progress)
    learned = None if predictors is None or predictors.kind != "learned" else predictors.predictors
    with progress.step("plan"):
        model = _count_model(config, captured, learned)
        plan = whole_plan(model, settings)
    if plan is not None:
        return plan
    with _firing_source(config, checkpoint, predictors, progress) as source, progress.step("plan"):
        made = make_plan(model, model_firing(model, source, learned), settings)
    if made.head == "host" and not any(each.hot_neurons or each.attention == "accelerator" for each in made.layers):
        progress.say(
            "the plan leaves the whole model on the host, because the GPU's memory is too small or the host is "
            f"faster; --target cpu stores the weights of {captured.facts.name} for a CPU alone"
        )
    return made


def _plan_options(machine: MachineOptions, mark: str | None, progress: Progress) -> PlanOptions:
    """Return the options of a plan for `machine`; `mark` is the model's fingerprint, None for a module in memory."""

    found = find_machine(machine)
    if found.warning is not None:
        progress.say(found.warning)
    return PlanOptions(found.target.name, found.machine, fingerprint=mark, most_gpu_bytes=found.usable_bytes)


def _count_model(config: CompileConfig, captured: Captured, predictors: Predictors | None) -> ModelBytes:

    packing = Packing(
        planned_format(config.quant),
        config.predictor,
        config.context,
        config.sequences,
        config.kv_dtype,
        config.chunk,
        config.tensors,
        config.predictor_quant,
        config.hot_by_outputs,
    )
    return count_bytes(captured.facts.name, captured.graph_module, packing, predictors)


def _firing_source(
    config: CompileConfig, checkpoint: Path | None, predictors: PredictorSet | None, progress: Progress
) -> AbstractContextManager[FiringSource]:
    """Return the profile that predictors were trained on, else one that is given or in the work folder, else make one.

    A profile that is not kept is deleted at the end of the block.
    """

    if checkpoint is None:
        raise UsageError(
            "the model does not fully fit the GPU, and a module in memory has no profile to choose hot neurons "
            "by; compile a model folder, or say which with hot or plan"
        )
    profile, work, activation = config.profile, config.work, config.activation
    if predictors is not None and predictors.profile is not None:
        is_kept = profile is not None or work is not None
        return nullcontext(FiringSource(predictors.profile, source=None if is_kept else NOT_KEPT))
    given = given_profile(profile, work, fingerprint(checkpoint, activation))
    if given is not None:
        return nullcontext(FiringSource(given))
    settings = ProfileOptions(calibration=config.calibration, activation=activation)
    return made_profile(checkpoint, work, settings, progress)
