"""The passes of a compilation, ours and those that were asked for, in order."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from picompile.config import CompileConfig, CompileOptions
from picompile.errors import UsageError

if TYPE_CHECKING:
    from picompile.frontend.captured import ModelFacts
    from picompile.placement.plan import Plan
    from picompile.predictors.predictor_set import PredictorSet
    from picompile_passes.base import Pass, Stage


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

    kind = str(options.predictor) if options.predictor is not None and options.is_lossless else "auto"
    hot = options.plan.hot_neurons() if options.plan is not None else dict(options.hot or {})
    return _passes(insert or InsertPredictors(kind), hot, options.quant, options.passes)


def compilation_passes(
    config: CompileConfig, facts: "ModelFacts", predictors: "PredictorSet | None", plan: "Plan | None"
) -> "list[Pass]":
    """Return the passes from captured to quantized of one compilation, in order.

    Args:
        config: what the model is compiled for.
        facts: of the model.
        predictors: the lossy predictors to insert, None where the predictor is lossless.
        plan: says which neurons are hot. Without one, those of `config` are; and where there is an accelerator, layers
            that it does not name are hot altogether.
    """
    from picompile_passes.passes.insert_predictors import InsertPredictors

    insert = InsertPredictors(config.predictor.insert_kind) if predictors is None else predictors.insert_pass()
    return _passes(insert, _hot_neurons(config, facts, plan), config.quant, config.debug.passes)


def _passes(insert: "Pass", hot: Mapping[int, Sequence[int]], quant: str, extra: Sequence[str]) -> "list[Pass]":
    from picompile_passes.passes.canonicalize import CANONICALIZE
    from picompile_passes.passes.partition import Partition
    from picompile_passes.passes.quantize import Quantize
    from picompile_passes.registry import make_pass

    named = [_with_stage(text) for text in extra]
    return _in_order(
        [*CANONICALIZE, insert, Partition(hot), Quantize(quant)], [(make_pass(name), stage) for name, stage in named]
    )


def _hot_neurons(config: CompileConfig, facts: "ModelFacts", plan: "Plan | None") -> Mapping[int, Sequence[int]]:
    """Return the neurons of each layer's hot part."""
    if plan is not None:
        return plan.hot_neurons()
    hot = dict(config.placement.hot or {})
    if config.placement.accelerator is None:
        return hot
    return {layer: hot.get(layer, range(facts.ffn)) for layer in range(facts.layers)} | hot


def _with_stage(text: str) -> "tuple[str, Stage | None]":
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


def _in_order(own: "Sequence[Pass]", extra: "Sequence[tuple[Pass, Stage | None]]") -> "list[Pass]":
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
