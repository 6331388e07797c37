"""Weights for tests: random ones for graphs, rows of neurons, and predictors that err."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from picompile_passes.base import copy_graph_module, without_unused
from picompile_passes.formats import predictor_format
from picompile_passes.graph.materialize import WeightSource, evaluate_constant
from picompile_passes.graph.nodes import arguments, attribute, calls, constant_nodes, has_real_data
from picompile_passes.graph.operands import (
    FFN,
    NEURON_LIMITS,
    NEURON_ROWS,
    PREDICT,
    PREDICTORS,
    ROUTE,
    SPARSE_FFN,
    expert_count,
    stream_of,
)
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.predictors import PREDICTOR_KINDS, PredictorKind, predictor_kind

# Random weights for graphs: `random_weights`; and the neurons of blocks by their weights: `neuron_rows`.


def neuron_rows(graph_module: GraphModule, weights: WeightSource) -> dict[int, Tensor]:
    """Return for each layer one row a neuron, of all its weights: float32 [neurons, gate + up + down + biases].

    The rows are sorted, and those of a layer's parts are together, so that the order of neurons makes no difference:
    two graphs have the same neurons where these are equal.
    """
    parts: dict[int, list[Tensor]] = {}
    for number, block in enumerate(calls(graph_module.graph, FFN, SPARSE_FFN)):
        # A graph that is not canonical yet has no numbers of layers, and one part of each block.
        parts.setdefault(block.meta.get("layer", number), []).append(_rows(graph_module, block, weights))
    return {layer: _sorted(torch.cat(rows)) for layer, rows in parts.items()}


def _rows(graph_module: GraphModule, block: Node, weights: WeightSource) -> Tensor:
    values = arguments(block)
    constants = [evaluate_constant(graph_module, values[n], weights) for n in NEURON_ROWS if values[n] is not None]
    return torch.cat([constant if constant.dim() == 2 else constant.unsqueeze(1) for constant in constants], dim=1)


def _sorted(rows: Tensor) -> Tensor:
    keys = rows.tolist()
    return rows[sorted(range(len(keys)), key=keys.__getitem__)]


def vocabulary(graph_module: GraphModule) -> int:
    """Return the number of token ids: rows of the matrix that tokens are looked up in; without one, the logits."""
    graph = graph_module.graph
    tokens, *_ = graph.find_nodes(op="placeholder")
    of_tokens = _reached_from(tokens)
    rows = [int(matrix.meta["val"].shape[0]) for ids, matrix in _lookups(graph) if ids in of_tokens]
    return min(rows, default=int(graph.output_node().args[0].meta["val"].shape[-1]))  # type: ignore[union-attr]


def embedding_names(graph_module: GraphModule) -> frozenset[str]:
    """Return the names of the parameters whose rows are looked up: for tokens, and for learned positions."""
    return _parameters_of(matrix for _, matrix in _lookups(graph_module.graph))


def predictor_names(graph_module: GraphModule) -> frozenset[str]:
    """Return the names of the parameters of predictors' own."""
    predictors = (arguments(node) for node in calls(graph_module.graph, PREDICT))
    own = [values for values in predictors if predictor_kind(values["kind"]).parameters is not None]
    return _parameters_of(weight for values in own for weight in values["weights"])


def _parameters_of(weights: Iterable[Node]) -> frozenset[str]:
    """The names of all parameters that `weights` depend on."""
    names: set[str] = set()
    stack = list(weights)
    while stack:
        node = stack.pop()
        names.update([str(node.target)] if node.op == "get_attr" else [])
        stack.extend(node.all_input_nodes)
    return frozenset(names)


def _lookups(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Ids (integers that depend on the input) and matrix (constant floats) of each."""
    constants = constant_nodes(graph)
    for node in graph.nodes:
        ids = [read for read in node.all_input_nodes if _is_tensor(read, floats=False) and read not in constants]
        matrices = [read for read in node.all_input_nodes if _is_tensor(read, floats=True) and read in constants]
        if len(ids) == len(matrices) == 1 and _is_tensor(node, floats=True) and matrices[0].meta["val"].dim() == 2:
            yield ids[0], matrices[0]


def _reached_from(start: Node) -> set[Node]:
    reached, stack = set(), [start]
    while stack:
        node = stack.pop()
        if node not in reached:
            reached.add(node)
            stack.extend(node.users)
    return reached


def _is_tensor(node: Node, *, floats: bool) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point() == floats


# The second makes values so small that the eps of a norm is no longer lost beside their mean square.
_EMBEDDING_SCALES = (1.0, 0.02)
# What else is small then, so that what attention and feed-forward blocks add to such values is small too.
_OTHER_SCALE = 0.25

# One row in so many is so much larger: activations are seen far from 0 too, where relu6 bends a second time.
_LARGE_ROW_SHARE, _LARGE_ROW_FACTOR = 1 / 8, 4.0


@dataclass
class RandomWeights:
    """A weight source in memory, which records in `loaded` what is loaded. `tensors` are by name."""

    tensors: dict[str, Tensor]
    loaded: list[str] = field(default_factory=list)

    def names(self) -> Iterable[str]:
        """The names of all tensors."""
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor `name`."""
        return tuple(self.tensors[name].shape)

    def load(self, name: str) -> Tensor:
        """The tensor `name` itself. Raises `KeyError` where there is none."""
        self.loaded.append(name)
        return self.tensors[name]


def random_weights(
    graph_module: GraphModule, seed: int = 0, dtype: torch.dtype = torch.float32, representable: str | None = None
) -> RandomWeights:
    """Return values of `dtype` for every parameter that `graph_module` reads; about half of the neurons fire.

    Seed and name determine the values of a parameter, whatever else is in the graph. Seeds differ in scale too: with
    even ones embeddings are about 1 in size, with odd ones 0.02, and all that follows is smaller, so that the eps of a
    norm matters.

    With `representable`, a weight format, every matrix is one that the format holds exactly: packed by rows or by
    columns, whole or any of them in any order, it comes out as it went in. Vectors are never packed. Raises
    `ValueError` for another format, also for those of quantized checkpoints alone.
    """
    if representable not in _DRAW:
        known = ", ".join(filter(None, _DRAW))
        raise ValueError(f"no weights are known to be representable in {representable!r}, only in {known}")
    embedding_scale = _EMBEDDING_SCALES[seed % 2]
    other_scale = 1.0 if embedding_scale == 1.0 else _OTHER_SCALE
    embeddings = embedding_names(graph_module)
    own = predictor_names(graph_module)
    tensors = {}
    for name, parameter in _parameters(graph_module).items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        if parameter.dim() >= 2 and not name.endswith("_bias"):
            scale = embedding_scale if name in embeddings else other_scale * parameter.shape[-1] ** -0.5
            form = predictor_format(representable) if representable and name in own else representable
            value = _DRAW[form](parameter.shape, scale, generator)
        else:
            value = _vector(name, parameter.shape, other_scale, generator)
        tensors[name] = value.to(dtype)
    return RandomWeights(tensors)


def _parameters(graph_module: GraphModule) -> dict[str, Tensor]:
    """Return the tensors that nodes read and that have no data, by name; capture holds these as buffers."""
    names = dict.fromkeys(str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr")
    tensors = {name: attribute(graph_module, name) for name in names}
    return {name: tensor for name, tensor in tensors.items() if not has_real_data(tensor)}


def _vector(name: str, shape: torch.Size, scale: float, generator: torch.Generator) -> Tensor:
    """Biases spread around 0, limits above; all other vectors are gains of norms, which spread around 1."""
    value = torch.randn(shape, generator=generator) * 0.2
    if name.endswith(NEURON_LIMITS):
        return value.abs() * scale
    return value * scale if name.rpartition(".")[2].endswith("bias") else value + 1.0


def _normal(shape: torch.Size, scale: float, generator: torch.Generator) -> Tensor:
    """Values of standard deviation `scale`; some rows are larger."""
    large = torch.rand(*shape[:-1], 1, generator=generator) < _LARGE_ROW_SHARE
    return torch.randn(shape, generator=generator) * scale * torch.where(large, _LARGE_ROW_FACTOR, 1.0)


def _half(shape: torch.Size, scale: float, generator: torch.Generator) -> Tensor:
    return _normal(shape, scale, generator).to(torch.float16).to(torch.float32)


def _drawn(shares: Mapping[float, float], shape: torch.Size, scale: float, generator: torch.Generator) -> Tensor:
    """Numbers of units that are drawn with these shares, of standard deviation near `scale`."""
    units, chances = torch.tensor([*shares]), torch.tensor([*shares.values()])
    count = max(1, shape.numel())
    values = units[torch.multinomial(chances, count, replacement=True, generator=generator)][: shape.numel()]
    deviation = float((chances * units**2).sum()) ** 0.5
    return values.reshape(shape) * _power_of_two(scale / deviation)


def _power_of_two(value: float) -> float:
    """The power of two next to `value`: multiplying by it rounds nothing."""
    return float(2.0 ** round(torch.tensor(value).log2().item()))


# The units that a matrix is drawn from, with the share of each. Their mean is 0, and the
# format holds exactly whichever of them meet in a group of 32:
# - q8: the group's scale is one unit.
# - q4, q6: the largest of a group is -8 or -32 of its scale, and the others are integers then. No size has both signs,
#   for there is no +8.
# - q4m: the 15 steps of a group's span are of 1, 2 or 3 units, and 0 is one of its codes.
# - mxfp4: numbers of E2M1, whichever is the largest, and all that q6, the head's format, needs.
_UNITS: Mapping[str, Mapping[float, float]] = {
    "q8": {-127.0: 1 / 3, 127.0: 1 / 3, 0.0: 1 / 3},
    "q6": {-32.0: 0.05, 16.0: 0.1, -8.0: 0.1, 4.0: 0.2, -2.0: 0.1, 1.0: 0.2, 0.0: 0.25},
    "q4m": {-30.0: 0.25, 15.0: 0.5, 0.0: 0.25},
    "q4": {-8.0: 0.1, 4.0: 0.2, -2.0: 0.2, 1.0: 0.4, 0.0: 0.1},
    "mxfp4": {6.0: 0.1, -3.0: 0.3, 1.5: 0.2, 0.0: 0.4},
}

_DRAW: dict[str | None, Callable[[torch.Size, float, torch.Generator], Tensor]] = {
    None: _normal,
    "f16": _half,
    **{name: partial(_drawn, shares) for name, shares in _UNITS.items()},
}


# Predictors for tests: they miss neurons that fire and name others that do not, so that masks matter.
#
# | kind | tells by | row-local |
# | --- | --- | --- |
# | `testing-linear` | x · wᵀ > threshold, w [F, D] | yes |
# | `testing-low-rank` | x · aᵀ · bᵀ > threshold, a [R, D], b [F, R] | no |
#
# Importing this module makes them known. They are plug-in kinds, which have weights of their own.


def _linear(x: Tensor, weights: list[Tensor], threshold: float) -> Tensor:
    (w,) = weights
    return x @ w.T > threshold


def _low_rank(x: Tensor, weights: list[Tensor], threshold: float) -> Tensor:
    a, b = weights
    return x @ a.T @ b.T > threshold


LINEAR_KIND = PredictorKind(
    "testing-linear", _linear, lambda weights: int(weights[0].shape[0]), row_local=True, parameters={"w": "FD"}
)
LOW_RANK_KIND = PredictorKind(
    "testing-low-rank",
    _low_rank,
    lambda weights: int(weights[1].shape[0]),
    row_local=False,
    parameters={"a": "RD", "b": "FR"},
)
TESTING_KINDS = (LINEAR_KIND.name, LOW_RANK_KIND.name)

for _kind in (LINEAR_KIND, LOW_RANK_KIND):
    PREDICTOR_KINDS.add(_kind)

SKIPPING_KINDS = ("learned", "learned-relu", "sign", *TESTING_KINDS)
"""The kinds that skip neurons which fire."""

# With the first about half of the neurons fire, then most, then few, and in the end all. Not 0, which a row of zeros is
# always next to.
_LOGITS = (0.1, -0.5, 1.0, -1e9)
_SHARES = (0.5, 0.4, 0.6, -1.0)


def with_predictors(graph_module: GraphModule, kind: str, threshold: float, rank: int = 2) -> GraphModule:
    """A copy of a graph of stage predicted, with a predictor of `kind`, one of `TESTING_KINDS`, in every block.

    Their weights are new parameters on the meta device. `rank` is R.
    """
    result = copy_graph_module(graph_module)
    rewriter = Rewriter(result, "testing")
    for mask in calls(result.graph, PREDICT):
        neurons, hidden = (int(value.meta["val"].shape[1]) for value in (mask, arguments(mask)["x"]))
        sizes = {"F": neurons, "D": hidden, "R": rank}
        shapes = {name: [sizes[i] for i in text] for name, text in (predictor_kind(kind).parameters or {}).items()}
        prefix = f"{PREDICTORS}{mask.meta['layer']}."
        weights = [rewriter.parameter(prefix + name, shape, sources=(mask,)) for name, shape in shapes.items()]
        for name, value in (("kind", kind), ("threshold", threshold), ("weights", weights)):
            mask.update_arg(list(arguments(mask)).index(name), value)
        # All at once: in between, the call would be one that its kind does not accept.
        rewriter.set_argument(mask, "weights", weights)
    return without_unused(result)


@st.composite
def skipping_predictors(draw: st.DrawFn, graph_module: GraphModule) -> InsertPredictors:
    """Passes that put predictors of `SKIPPING_KINDS` into a canonical graph: one kind mostly, any in some layers.

    Blocks of some layers get limits as well.
    """
    blocks = list(calls(graph_module.graph, FFN))
    inputs = {block.meta["layer"]: arguments(block)["x"] for block in blocks}
    kind = draw(st.sampled_from(SKIPPING_KINDS))
    others = st.sampled_from([None, None, *SKIPPING_KINDS, "none"])
    kinds = {layer: other for layer in inputs if (other := draw(others)) is not None}
    ranks, sources, thresholds = {}, {}, {}
    for layer, x in inputs.items():
        chosen = predictor_kind(kinds.get(layer, kind))
        if chosen.has_rank:
            ranks[layer] = draw(st.integers(1, 4))
        if chosen.parameters is not None:
            known = ["block", *(["stream"] if stream_of(x) else []), *(["previous"] if layer - 1 in inputs else [])]
            sources[layer] = draw(st.sampled_from(known))
        if not chosen.lossless:
            thresholds[layer] = draw(st.sampled_from(_SHARES if chosen.name == "sign" else _LOGITS))
    with_limits = []
    for block in blocks:
        if arguments(block)["norm_eps"] is None and not expert_count(block) and draw(st.integers(0, 3)) == 0:
            with_limits.append(block)
    gated = [block for block in with_limits if arguments(block)["gate"] is not None and draw(st.booleans())]
    limits = (tuple(block.meta["layer"] for block in blocks) for blocks in (gated, with_limits))
    return InsertPredictors(kind, kinds, ranks, sources, thresholds, *limits)


def every_neuron(graph_module: GraphModule) -> GraphModule:
    """A copy of a graph in which every neuron is computed, whatever predictors, limits and routers say."""
    result = copy_graph_module(graph_module)
    rewriter = Rewriter(result, "testing")
    for block in calls(result.graph, SPARSE_FFN):
        mask = arguments(block)["mask"]
        x = arguments(block)["x"]
        rows = rewriter.constant("rows", torch.zeros(int(mask.meta["val"].shape[1]), 1))
        everything = rewriter.call(PREDICT, (x, [rows], "none", 0.0), before=block, sources=(mask,))
        rewriter.set_argument(block, "mask", everything)
        for name in NEURON_LIMITS:
            if arguments(block)[name] is not None:
                rewriter.set_argument(block, name, None)
    for gains in calls(result.graph, ROUTE):
        values = arguments(gains)
        for name, every in (("chosen", int(gains.meta["val"].shape[1])), ("chosen_groups", values["groups"])):
            rewriter.set_argument(gains, name, every)
    return without_unused(result)
