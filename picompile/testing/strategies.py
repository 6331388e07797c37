"""Hypothesis strategies for testing passes: graphs of any stage, neuron sets, pipelines, targets."""

from collections.abc import Mapping
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

from picompile.machine.targets import TARGETS, Target
from picompile.testing.captured.decoder import captured_decoders
from picompile.testing.shapes import build, shapes
from picompile.testing.weights import skipping_predictors
from picompile_passes.base import Pass, Stage, stage_of
from picompile_passes.dialect import parse_activation
from picompile_passes.formats import E8M0, FORMATS
from picompile_passes.graph.nodes import arguments, calls, has_real_data
from picompile_passes.graph.operands import FFN, SPARSE_FFN, expert_count
from picompile_passes.passes.canonicalize import CANONICALIZE, canonicalize
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Pipeline

# Beside 0, all formats that are drawn hold it: its 127th, 15th, 8th and 32nd part are float16 numbers.
_HELD_BY_ALL_FORMATS = 127 * 15 / 2048
# Powers of two hold no number whose 127th part is a float16. Formats of quantized checkpoints alone hold others.
_DRAWN_FORMATS = tuple(name for name in FORMATS.builtin if FORMATS[name].rows and FORMATS[name].scale != E8M0)
_MACHINES = ("x86_64", "aarch64")
_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "asimd", "asimddp", "sve")


def graphs(stage: Stage = Stage.CANONICAL) -> st.SearchStrategy[GraphModule]:
    """Graph modules of `stage`, which verify: parameters on the meta device, a token count that is a symbol.

    Captured ones are `captured_decoders`, with none, some, or all but the last of the passes of `CANONICALIZE` behind
    them. Canonical ones are the `Shape`s, or captured ones with all of these passes behind them; matrices of constants
    (sinusoids of positions) are made such that no weight format rounds them. Those of a later stage come from canonical
    ones by our own passes with drawn options, predictors of all kinds included.
    """
    return _GRAPHS[stage]()


@st.composite
def _captured(draw: st.DrawFn) -> GraphModule:
    # Drawn first: hypothesis varies what comes late, after a whole decoder, less.
    raising = [pass_ for pass_ in CANONICALIZE if pass_.ensures is Stage.CAPTURED]
    passes = raising[: draw(st.integers(0, len(raising)))]
    graph_module = draw(captured_decoders())
    for pass_ in passes:
        graph_module = pass_(graph_module).graph_module
    return graph_module


def _canonical() -> st.SearchStrategy[GraphModule]:
    by_hand = shapes().map(build)
    return st.one_of(by_hand, by_hand, captured_decoders().map(_canonicalized))


def _canonicalized(graph_module: GraphModule) -> GraphModule:
    result = canonicalize(graph_module)
    for name, tensor in list(result.named_buffers()):
        if has_real_data(tensor) and tensor.dim() == 2 and tensor.is_floating_point():
            path, _, leaf = name.rpartition(".")
            held = (tensor > tensor.median()) * _HELD_BY_ALL_FORMATS
            result.get_submodule(path).register_buffer(leaf, held)
    return result


@st.composite
def _predicted(draw: st.DrawFn) -> GraphModule:
    skips = draw(st.booleans())
    graph_module = draw(_canonical())
    if skips:
        return draw(skipping_predictors(graph_module))(graph_module).graph_module
    return InsertPredictors(draw(st.sampled_from(_kinds(graph_module))))(graph_module).graph_module


@st.composite
def _partitioned(draw: st.DrawFn) -> GraphModule:
    graph_module = draw(_predicted())
    return Partition(draw(hot_sets(graph_module)))(graph_module).graph_module


@st.composite
def _quantized(draw: st.DrawFn) -> GraphModule:
    graph_module = draw(st.one_of(_partitioned(), _predicted()))
    return Quantize(draw(st.sampled_from(_DRAWN_FORMATS)))(graph_module).graph_module


_GRAPHS = {
    Stage.CAPTURED: _captured,
    Stage.CANONICAL: _canonical,
    Stage.PREDICTED: _predicted,
    Stage.PARTITIONED: _partitioned,
    Stage.QUANTIZED: _quantized,
}


@st.composite
def masks(draw: st.DrawFn, tokens: int, neurons: int) -> Tensor:
    """Masks of firing neurons: bool [tokens, neurons], from none to all of them."""
    share = draw(st.sampled_from([0.5, 0.1, 0.9, 0.0, 1.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    return torch.rand(tokens, neurons, generator=generator) < share


def partitions(neurons: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Hot sets among `neurons`, ascending: mostly any set; also a range, one, none or all of them."""
    everything = tuple(range(neurons))
    if neurons < 2:
        return st.sampled_from([everything, ()])
    some = st.builds(_sample, st.just(neurons), st.integers(1, neurons - 1), st.integers(0, 2**16))
    ends = st.tuples(st.integers(0, neurons), st.integers(0, neurons)).map(sorted)
    one = st.integers(0, neurons - 1).map(lambda neuron: (neuron,))
    stretch = ends.map(lambda pair: everything[slice(*pair)])
    return st.one_of(some, some, some, stretch, one, st.sampled_from([(), everything]))


def _sample(neurons: int, count: int, seed: int) -> tuple[int, ...]:
    return tuple(sorted(Random(seed).sample(range(neurons), count)))


def hot_sets(graph_module: GraphModule) -> st.SearchStrategy[dict[int, tuple[int, ...]]]:
    """Layer → hot neurons, for some of the layers that are not partitioned yet; of experts all or none."""
    blocks = [node for node in calls(graph_module.graph, FFN, SPARSE_FFN) if "neurons" not in node.meta]
    # A graph that is not canonical yet does not say which layer a block is of.
    sets = {
        node.meta.get("layer", number): _sets(int(arguments(node)["up"].meta["val"].shape[0]), expert_count(node))
        for number, node in enumerate(blocks)
    }
    # Absent seldom: what is interesting happens in layers that are there.
    choices = {layer: st.one_of(st.none(), *[drawn] * 4) for layer, drawn in sets.items()}
    return st.fixed_dictionaries(choices).map(_without_none)


def _sets(neurons: int, experts: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.sampled_from([(), tuple(range(neurons))]) if experts else partitions(neurons)


def _without_none(hot: Mapping[int, tuple[int, ...] | None]) -> dict[int, tuple[int, ...]]:
    return {layer: neurons for layer, neurons in sorted(hot.items()) if neurons is not None}


def targets() -> st.SearchStrategy[Target]:
    """Rows of `TARGETS`, and machines that do not exist."""
    names = st.from_regex(r"[a-z0-9][a-z0-9-]{0,11}", fullmatch=True).filter(lambda name: name not in TARGETS)
    features = st.lists(st.sampled_from(_FEATURES), unique=True).map(tuple)
    machines = st.sampled_from(_MACHINES)
    made_up = st.builds(Target, name=names, description=st.just("made up"), machine=machines, features=features)
    return st.one_of(st.sampled_from(list(TARGETS.values())), made_up)


def pipelines(
    stage: Stage | None = None, *, ordered: bool | None = None, graph_module: GraphModule | None = None
) -> st.SearchStrategy[Pipeline]:
    """Pipelines of our own passes, for graphs of `stage`, with drawn options.

    With `ordered` the passes are those of compilation in their order, up to any of them, some run twice. Without, they
    are any passes in any order, which may not fit the stage or one another. None is both, the first mostly. Predictors
    lose nothing. Layers are partitioned, and predictor `exact` is asked for, only where `graph_module` is given: the
    graph to be run on. By default the stage is that of the graph, and any without one.
    """
    if stage is None and graph_module is not None:
        stage = stage_of(graph_module)
    stages = st.sampled_from(list(Stage)) if stage is None else st.just(stage)
    in_order = stages.flatmap(lambda start: _ordered(start, graph_module))
    in_any = st.lists(st.one_of(*_passes(graph_module)), max_size=6).map(lambda passes: Pipeline(tuple(passes)))
    if ordered is None:
        return st.one_of(in_order, in_order, in_order, in_any)
    return in_order if ordered else in_any


@st.composite
def _ordered(draw: st.DrawFn, stage: Stage, graph_module: GraphModule | None) -> Pipeline:
    whole = _passes(graph_module, stage)
    length = draw(st.one_of(st.integers(0, len(whole)), st.just(len(whole))))
    passes: list[Pass] = []
    for strategy in whole[:length]:
        pass_ = draw(strategy)
        again = pass_.idempotent and draw(st.sampled_from([False, False, False, True]))
        passes += [pass_] * (2 if again else 1)
    return Pipeline(tuple(passes))


def _passes(graph_module: GraphModule | None, stage: Stage = Stage.CAPTURED) -> list[st.SearchStrategy[Any]]:
    """The passes of compilation from `stage` on, in order, each with its options left to be drawn."""
    kinds = ["auto", "none"] if graph_module is None else _kinds(graph_module)
    hot: st.SearchStrategy[Any] = st.just({}) if graph_module is None else hot_sets(graph_module)
    passes: list[tuple[Stage, st.SearchStrategy[Any]]] = [(Stage.CANONICAL, st.just(pass_)) for pass_ in CANONICALIZE]
    passes += [
        (Stage.PREDICTED, st.sampled_from(kinds).map(InsertPredictors)),
        (Stage.PARTITIONED, hot.map(Partition)),
        (Stage.QUANTIZED, st.sampled_from(_DRAWN_FORMATS).map(Quantize)),
    ]
    return [strategy for leads_to, strategy in passes if leads_to > stage]


def _kinds(graph_module: GraphModule) -> list[str]:
    """The lossless kinds of `insert-predictors` that the graph allows. One without raised blocks does not show them."""
    activations = [parse_activation(arguments(block)["activation"]) for block in calls(graph_module.graph, FFN)]
    allows_exact = activations and all(activation.sparse for activation in activations)
    return ["auto", "none", *(["exact"] if allows_exact else [])]
