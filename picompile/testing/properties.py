"""The properties that every pass must have, each a function of one run: `PROPERTIES`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from picompile.testing.equivalence import assert_equivalent, structure
from picompile.testing.weights import every_neuron, neuron_rows
from picompile_passes.base import Effect, GraphPass, PassResult, Stage, copy_graph_module, set_stage, stage_of
from picompile_passes.errors import PassesError, StageError, UnsupportedGraphError
from picompile_passes.graph.dump import graph_text
from picompile_passes.graph.materialize import WeightSource
from picompile_passes.graph.nodes import MARKS, arguments, calls, has_real_data
from picompile_passes.graph.operands import PREDICTORS, SPARSE_FFN, expert_count
from picompile_passes.graph.rewriter import Provenance
from picompile_passes.passes.canonicalize import canonicalize
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Pipeline, verifying
from picompile_passes.verify import verify

# The metadata that passes may change on nodes that they keep.
_MAY_CHANGE = ("val", *MARKS, "notes")

# Rounding all weights to float16 moves logits by some 2^-11 of their size, and by more where they cancel.
_F16_BOUND = 0.05


@dataclass(frozen=True)
class Snapshot:
    """The state of a graph module at one time, to detect later changes."""

    stage: Stage
    nodes: Any
    tensors: Mapping[str, int]

    @staticmethod
    def of(graph_module: GraphModule) -> "Snapshot":
        """The snapshot of `graph_module` as it is."""
        tensors = {name: id(tensor) for name, tensor in _tensors(graph_module).items()}
        return Snapshot(stage_of(graph_module), structure(graph_module), tensors)


@dataclass(frozen=True)
class Trial:
    """One run of `pass_` on `before`, whose snapshot from before the run is `was`.

    `weights` are those that the effect is judged by; `bound` is the relative error that a rounding pass may cause, None
    where it may cause none on these weights.
    """

    pass_: GraphPass
    before: GraphModule
    was: Snapshot
    result: PassResult
    weights: WeightSource
    bound: float | None
    seed: int

    @property
    def after(self) -> GraphModule:
        """The graph that the pass made."""
        return self.result.graph_module


Property = Callable[[Trial], Iterator[str]]


def input_untouched(trial: Trial) -> Iterator[str]:
    """The pass leaves its input as it was: nodes, metadata, stage, tensors."""
    if Snapshot.of(trial.before) != trial.was:
        yield "it changed the graph that went in: change rewriter.graph, which is a copy"


def honest(trial: Trial) -> Iterator[str]:
    """`modified` is true where the graph or its stage changed; where it is false, the result is the input itself."""
    modified, same = trial.result.modified, trial.after is trial.before
    if not modified and not same:
        yield "modified is false, but the result is another graph module"
    if modified and (same or _looks_like(trial.before, trial.after)):
        yield "modified is true, but the graph and its stage are as before: count only real changes"


def leads_to_its_stage(trial: Trial) -> Iterator[str]:
    """The result's stage is the one that the pass ensures, or else the input's."""
    expected = trial.was.stage if trial.pass_.ensures is None else trial.pass_.ensures
    if stage_of(trial.after) != expected:
        yield f"the result is {stage_of(trial.after).text}, not {expected.text}"


def verifies(trial: Trial) -> Iterator[str]:
    """The result keeps every rule of its stage."""
    try:
        verify(trial.after, stage_of(trial.after))
    except PassesError as error:
        yield str(error)


def keeps_metadata(trial: Trial) -> Iterator[str]:
    """Every node has a value; a new node names the pass and the nodes it was made from; an old node keeps its names."""
    old = {node.name: node for node in trial.before.graph.nodes}
    had_values = all("val" in node.meta for node in old.values() if node.op != "output")
    for node in trial.after.graph.nodes:
        if had_values and node.op != "output" and "val" not in node.meta:
            yield f'{node.name} has no meta["val"]'
        # A name that a removed node had may be given again, to another operator.
        if node.name not in old or node.target != old[node.name].target:
            yield from _origin_faults(node, trial.pass_, old)
        elif lost := [key for key, value in _meta(old[node.name]).items() if _meta(node).get(key) != value]:
            yield f"{node.name} lost or changed its {', '.join(lost)}"


def keeps_weights(trial: Trial) -> Iterator[str]:
    """No parameter is changed, and none made but a predictor's; any other new tensor is real and on the CPU."""
    before = _tensors(trial.before)
    parameters = {name for name, _ in trial.after.named_parameters(remove_duplicate=False)}
    for name, tensor in _tensors(trial.after).items():
        if name in before and tensor is not before[name]:
            yield f"{name} is another tensor than before"
        if name in before or (name.startswith(PREDICTORS) and tensor.is_meta):
            continue
        if name in parameters or tensor.device.type != "cpu":
            yield f"{name} is new, but only constants on the CPU and parameters called {PREDICTORS}… may be added"


def keeps_neurons(trial: Trial) -> Iterator[str]:
    """Each block has the same neurons after as before, each once, with its own gate, up and down rows and biases."""
    if _effect(trial.pass_) is Effect.CHANGES or trial.bound is not None:
        return
    before, after = (neuron_rows(graph_module, trial.weights) for graph_module in (trial.before, trial.after))
    for layer, rows in before.items():
        if layer not in after:
            yield f"layer {layer} has lost its feed-forward block"
        elif rows.shape != after[layer].shape or not torch.equal(rows, after[layer]):
            yield f"layer {layer} has other neurons than before: one is missing, occurs twice, or is mixed with another"


def equivalent(trial: Trial) -> Iterator[str]:
    """The logits stay as they were in eager PyTorch, as far as the effect promises."""
    before, after, effect = trial.before, trial.after, _effect(trial.pass_)
    if effect is Effect.CHANGES:
        return
    if effect is Effect.SKIPS:
        before, after = every_neuron(before), every_neuron(after)
    try:
        assert_equivalent(before, after, weights=trial.weights, bound=trial.bound, seed=trial.seed)
    except AssertionError as error:
        yield str(error)


def idempotent(trial: Trial) -> Iterator[str]:
    """A second run of a pass that claims to be idempotent modifies nothing."""
    if not getattr(trial.pass_, "idempotent", False):
        return
    again = trial.pass_(trial.after)
    if again.modified or again.graph_module is not trial.after:
        yield "a second run, on its own result, modifies it: rewrite less, or declare idempotent = False"


def deterministic(trial: Trial) -> Iterator[str]:
    """Two runs on the same input give the same graph, names included."""
    again = trial.pass_(trial.before).graph_module
    if graph_text(again) != graph_text(trial.after) or not _same_constants(again, trial.after):
        yield "two runs on the same graph give different results"


def refuses_other_stages(trial: Trial) -> Iterator[str]:
    """A graph of a stage that the pass does not accept raises an error that names the stage it needs."""
    last = max(Stage) if trial.pass_.ensures is None else trial.pass_.ensures
    for stage in Stage:
        if trial.pass_.requires <= stage <= last:
            continue
        graph_module = copy_graph_module(trial.before)
        set_stage(graph_module, stage)
        try:
            trial.pass_(graph_module)
        except StageError as error:
            if trial.pass_.requires.text not in str(error):
                yield f"it refuses a graph of stage {stage.text} without naming the stage it needs"
        else:
            yield f"it accepts a graph of stage {stage.text}"


def continues(trial: Trial) -> Iterator[str]:
    """The rest of the pipeline accepts the result, and its final graph still computes the same."""
    if not trial.result.modified:
        return
    try:
        quantized = _to_the_end(trial.after)
    except PassesError as error:
        # What the pipeline does not support without the pass either is no fault of the pass.
        if not isinstance(error, UnsupportedGraphError) or _is_supported(trial.before):
            yield f"the rest of the pipeline fails on what it makes: {error}"
        return
    if _effect(trial.pass_) is not Effect.EXACT:
        return
    try:
        # Rounding may reverse the prediction for a neuron near the threshold.
        before, after = every_neuron(trial.before), every_neuron(quantized)
        assert_equivalent(before, after, weights=trial.weights, bound=_F16_BOUND, seed=trial.seed)
    except AssertionError as error:
        yield f"at the end of the pipeline: {error}"


PROPERTIES: Mapping[str, Property] = {
    check.__name__.replace("_", "-"): check
    for check in (
        input_untouched,
        honest,
        leads_to_its_stage,
        verifies,
        keeps_metadata,
        keeps_weights,
        keeps_neurons,
        equivalent,
        idempotent,
        deterministic,
        refuses_other_stages,
        continues,
    )
}


def _effect(pass_: GraphPass) -> Effect:
    return getattr(pass_, "effect", Effect.EXACT)


def _tensors(graph_module: GraphModule) -> dict[str, Tensor]:
    named = (graph_module.named_parameters, graph_module.named_buffers)
    return {name: tensor for each in named for name, tensor in each(remove_duplicate=False)}


def _looks_like(before: GraphModule, after: GraphModule) -> bool:
    same_graph = stage_of(before) == stage_of(after) and graph_text(before) == graph_text(after)
    return same_graph and _same_constants(before, after)


def _same_constants(one: GraphModule, other: GraphModule) -> bool:
    left, right = _tensors(one), _tensors(other)
    real = [name for name, tensor in left.items() if has_real_data(tensor)]
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in real)


def _meta(node: Node) -> dict[str, Any]:
    return {key: value for key, value in node.meta.items() if key not in _MAY_CHANGE}


def _origin_faults(node: Node, pass_: GraphPass, old: Mapping[str, Node]) -> Iterator[str]:
    origin = node.meta.get("from")
    if not isinstance(origin, Provenance):
        yield f'{node.name} is new and has no meta["from"]: create it with rewriter.call, constant or parameter'
    elif isinstance(pass_, Pipeline):
        # Its own passes made the node, and from nodes that may have come and gone in between.
        return
    elif origin.pass_name != pass_.name:
        yield f"{node.name} is new, but its provenance names the pass {origin.pass_name}"
    elif missing := [source for source in origin.sources if source not in old]:
        yield f"the sources of {node.name} include {', '.join(missing)}, which the input graph does not have"
    elif not origin.sources:
        yield f"{node.name} is new and names no node that it was made from: pass sources= to the rewriter"
    elif "nn_module_stack" in old[origin.sources[0]].meta and "nn_module_stack" not in node.meta:
        yield f"{node.name} is new and lacks the nn_module_stack of {origin.sources[0]}, its first source"


def _to_the_end(graph_module: GraphModule) -> GraphModule:
    """Run the rest of the standard pipeline on a graph of any stage; every other neuron is hot unless partitioned."""
    stage = stage_of(graph_module)
    if stage == Stage.CAPTURED:
        graph_module = canonicalize(graph_module)
        verify(graph_module, Stage.CANONICAL)
    if stage <= Stage.CANONICAL:
        graph_module = InsertPredictors()(graph_module).graph_module
    if stage <= Stage.PREDICTED:
        hot = {
            block.meta["layer"]: range(0, int(arguments(block)["up"].meta["val"].shape[0]), 2)
            for block in calls(graph_module.graph, SPARSE_FFN)
            if not expert_count(block)
        }
        graph_module = Pipeline((Partition(hot),), verifying)(graph_module).graph_module
    return Pipeline((Quantize("f16"),), verifying)(graph_module).graph_module


def _is_supported(graph_module: GraphModule) -> bool:
    try:
        _to_the_end(graph_module)
    except PassesError:
        return False
    return True
