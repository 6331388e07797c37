"""The passes of a compilation: ours and those that were asked for, in order, and how they are run."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from picompile.compile_options import CompileOptions
from picompile.errors import UsageError
from picompile.progress import Progress

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from picompile.frontend import Captured
    from picompile.frontend.captured import ModelFacts
    from picompile.placement.plan import Plan
    from picompile_passes.base import Pass, Stage


def pipeline_passes(
    options: CompileOptions,
    insert: "Pass | None" = None,
    facts: "ModelFacts | None" = None,
    plan: "Plan | None" = None,
) -> "list[Pass]":
    """The passes from captured to quantized, in order; `insert` is the one that puts lossy predictors in.

    `plan`, or that of `options`, says which neurons are hot; without one, every layer of the model that
    `facts` are of gets a hot part where there is a hot device.
    """
    from picompile_passes.passes.canonicalize import CANONICALIZE
    from picompile_passes.passes.insert_predictors import InsertPredictors
    from picompile_passes.passes.partition import Partition
    from picompile_passes.passes.quantize import Quantize
    from picompile_passes.registry import make_pass

    own = [
        *CANONICALIZE,
        insert or InsertPredictors(str(options.predictor) if options.predictor in ("exact", "none") else "auto"),
        Partition(_hot_neurons(options, facts, plan)),
        Quantize(options.quant),
    ]
    extra = [_with_stage(text) for text in options.passes]
    return _in_order(own, [(make_pass(name), stage) for name, stage in extra])


def _hot_neurons(
    options: CompileOptions, facts: "ModelFacts | None", plan: "Plan | None"
) -> Mapping[int, Sequence[int]]:
    """Layer → the neurons of its hot part."""
    plan = plan or options.plan
    if plan is not None:
        return plan.hot_neurons()
    hot = dict(options.hot or {})
    if facts is None or options.device is None:
        return hot
    return {layer: hot.get(layer, range(facts.ffn)) for layer in range(facts.layers)} | hot


def _with_stage(text: str) -> "tuple[str, Stage | None]":
    """The pass and the stage that `name{option=value}@stage` names; the stage may be left out."""
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
    """`own` passes, with each of the `extra` ones where its stage, or else the one it requires, is reached."""
    from picompile_passes.base import Stage

    ordered, reached = [], min(Stage)
    waiting = [(pass_, pass_.requires if stage is None else max(stage, pass_.requires)) for pass_, stage in extra]
    for pass_ in own:
        ordered += [other for other, stage in waiting if stage <= reached]
        waiting = [(other, stage) for other, stage in waiting if stage > reached]
        ordered.append(pass_)
        reached = max(reached, pass_.ensures or reached)
    return [*ordered, *(other for other, _ in waiting)]


def _own_folder() -> Path:
    """A new folder for this user alone, which stays: what is in it is for people."""
    return Path(tempfile.mkdtemp(prefix="picompile-reproducer-"))


def run_passes(
    captured: "Captured", options: CompileOptions, progress: Progress, passes: "Sequence[Pass] | None" = None
) -> "GraphModule":
    """Runs `passes`, or else the pipeline of `options`, on a captured graph; the result is of the quantized stage."""
    from picompile_passes.pipeline import Dump, Pipeline, each, verifying

    passes = pipeline_passes(options) if passes is None else passes
    # Dumped before it is verified, so that a faulty graph is there to be looked at.
    dump = Dump(options.dump_ir) if options.dump_ir is not None else None
    with progress.step("passes", len(passes)) as advance:
        hook = each(dump, verifying if options.verify else None, lambda *_: advance(1))
        pipeline = Pipeline(tuple(passes), hook, reproducers=options.dump_ir or _own_folder)
        return pipeline(captured.graph_module).graph_module
