"""The driver's passes: from the captured graph to the quantized one, with the extra ones that the user asks for."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.fx import GraphModule

from picompile.choices import DEFAULT_QUANT, base_format
from picompile.config import CompileConfig, CompileOptions, predictor_quant
from picompile.errors import UsageError
from picompile.frontend.captured import Captured, ModelFacts
from picompile.placement.plan import Plan
from picompile.predictors.predictor_set import PredictorSet
from picompile.progress import Progress
from picompile_passes.base import Pass, Stage
from picompile_passes.passes.canonicalize import CANONICALIZE
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Dump, Pipeline, each, verifying
from picompile_passes.registry import make_pass
from picompile_passes.reproducer import make_reproducer_folder


def run_passes(
    captured: Captured,
    passes: Sequence[Pass],
    progress: Progress,
    dump_ir: Path | None = None,
    *,
    verify: bool = True,
) -> GraphModule:
    """Return the graph of `captured` after `passes`.

    Args:
        captured: the model; its graph is not changed.
        passes: the passes, in order.
        progress: is told of each pass.
        dump_ir: a folder that receives the graph after every pass.
        verify: whether the rules of its stage are checked on each graph.
    """
    # The dump comes before verification, so that a faulty graph is there to be looked at.
    dump = Dump(dump_ir) if dump_ir is not None else None
    with progress.step("passes", len(passes)) as advance:
        hook = each(dump, verifying if verify else None, lambda *_: advance(1))
        pipeline = Pipeline(tuple(passes), hook, reproducers=dump_ir or make_reproducer_folder)
        return pipeline(captured.graph_module).graph_module


def pipeline_passes(options: CompileOptions, insert: Pass | None = None) -> list[Pass]:
    """Return the passes from captured to quantized that `options` ask for, in order.

    The model is not known here: hot neurons are those that a plan or `hot` names.

    Args:
        options: what to compile for.
        insert: the pass that inserts predictors; by default `InsertPredictors` of a lossless kind.

    Raises:
        RegistryError, PassOptionError, UsageError: an extra pass, one of its options or its stage is not known.
    """

    kind = str(options.predictor) if options.predictor is not None and options.is_lossless else "auto"
    hot = options.plan.hot_neurons() if options.plan is not None else dict(options.hot or {})
    quantize = Quantize(base_format(options.quant or DEFAULT_QUANT), predictor_quant(options))
    return all_passes([insert or InsertPredictors(kind)], hot, quantize, options.passes)


def compilation_passes(
    config: CompileConfig, facts: ModelFacts, predictors: PredictorSet | None, plan: Plan | None
) -> list[Pass]:
    """Return the passes from captured to quantized of one compilation, in order.

    Args:
        config: what the model is compiled for.
        facts: of the model.
        predictors: the lossy predictors to insert, None where the predictor is lossless.
        plan: says which neurons are hot. Without one, `config` names them, and if there is an accelerator, all neurons
            of layers that it does not name are hot.
    """
    insert = insert_passes(config, predictors)
    return all_passes(insert, hot_neurons(config, facts, plan), quantize_pass(config), config.passes)


def quantize_pass(config: CompileConfig) -> Pass:
    """Return the pass that packs matrices in the formats of `config`."""

    return Quantize(
        base_format(config.quant),
        config.predictor_quant,
        tensors=config.tensors,
        hot_by_outputs=config.hot_by_outputs,
    )


def insert_pass(config: CompileConfig, predictors: PredictorSet | None) -> InsertPredictors:
    """Return the pass that inserts predictors: the lossy ones, or those of the config's lossless kind."""

    return InsertPredictors(config.insert_kind) if predictors is None else predictors.insert_pass()


def insert_passes(config: CompileConfig, predictors: PredictorSet | None) -> list[Pass]:
    """Return the passes that insert predictors, and limits where these are known."""
    insert = insert_pass(config, predictors)
    return [insert if config.limits is None else config.limits.limits.sites.insertion(insert)]


def all_passes(
    insert: Sequence[Pass], hot: Mapping[int, Sequence[int]], quantize: Pass, extra: Sequence[str]
) -> list[Pass]:
    """Return all passes in order: `insert` behind those that raise, a partition by `hot` neurons, and `quantize`.

    `extra` are the texts of `--pass`. Raises as `pipeline_passes` does.
    """
    named = [_parse_pass(text) for text in extra]
    return _insert_extra(
        [*CANONICALIZE, *insert, Partition(hot), quantize], [(make_pass(name), stage) for name, stage in named]
    )


def hot_neurons(config: CompileConfig, facts: ModelFacts, plan: Plan | None) -> Mapping[int, Sequence[int]]:
    """Return the neurons of each layer's hot part."""
    if plan is not None:
        return plan.hot_neurons()
    hot = dict(config.hot or {})
    if config.back_end is None:
        return hot
    return {layer: hot.get(layer, range(facts.ffn)) for layer in range(facts.layers)} | hot


def _parse_pass(text: str) -> tuple[str, Stage | None]:
    """Return the pass and the stage that `name{option=value}@stage` names; None for a stage that is left out."""

    name, at, stage = text.rpartition("@")
    # An option may hold an @ too.
    if not at or "}" in stage:
        return text, None
    known = {each.text: each for each in Stage}
    if stage not in known:
        raise UsageError(f"--pass {text}: {stage!r} is no stage; the stages are {', '.join(known)}")
    return name, known[stage]


def _insert_extra(own: Sequence[Pass], extra: Sequence[tuple[Pass, Stage | None]]) -> list[Pass]:
    """Return `own` passes, with each of the `extra` ones where its stage, or else the one it requires, is reached."""

    ordered, reached = [], min(Stage)
    waiting = [(pass_, pass_.requires if stage is None else max(stage, pass_.requires)) for pass_, stage in extra]
    for pass_ in own:
        # One of ours that stays in a stage completes what the pass before it makes: canonical graphs get all layers.
        if pass_.ensures is not None:
            ordered += [other for other, stage in waiting if stage <= reached]
            waiting = [(other, stage) for other, stage in waiting if stage > reached]
        ordered.append(pass_)
        reached = max(reached, pass_.ensures or reached)
    return [*ordered, *(other for other, _ in waiting)]
