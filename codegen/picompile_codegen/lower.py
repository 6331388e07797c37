"""Lowering: the quantized graph becomes calls of kernels over planned buffers.

1. Every node becomes one or two calls; weights are entered into the table of packed tensors; nothing is read yet.
2. This happens for each of the functions that a program has:
   `decode`        one token
   `prefill`       a chunk of the prompt, only as far as the KV cache needs it
   `prefill_last`  the last chunk: everything after the last attention runs for the last token alone
   `score`         a chunk with logits for every token, for perplexity
   `batch`         one token each of several sequences, where the KV cache holds several
   `decode` and `batch` have masks of neurons made; the others compute every neuron, and leave out what predictors
   alone need.
3. The activations of each function get places in one arena.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from picompile_codegen import kernels
from picompile_codegen.function import Function, LowerOptions, Shared, dimension
from picompile_codegen.isa import Isa
from picompile_codegen.kernels import Kernel
from picompile_codegen.kernels.kernel import STEP_SHAPE
from picompile_codegen.lower_attention import extend_cache
from picompile_codegen.lower_ops import lower_node
from picompile_codegen.packing import WeightTable
from picompile_codegen.plan_buffers import align, plan_buffers
from picompile_codegen.program import Program, Tensor, tensor_bytes
from picompile_codegen.retarget import Recipe, kernels_for
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.nodes import arguments, constant_nodes, is_call
from picompile_passes.operands import ATTENTION, PREDICT

__all__ = ["LowerOptions", "Lowered", "lower"]


@dataclass(frozen=True)
class Lowered:
    """A program, the kernels it calls (`built`, by their recipes) and the tensors it reads."""

    program: Program
    built: Mapping[Recipe, Kernel]
    weights: WeightTable

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels for the instruction set that was current when the graph was lowered."""
        return tuple(self.built.values())

    def kernels_for(self, isa: Isa) -> tuple[Kernel, ...]:
        """The same kernels for `isa`."""
        return kernels_for(isa, self.built)


def lower(graph_module: GraphModule, options: LowerOptions) -> Lowered:
    """Lowers a graph of the quantized stage. Raises `UnsupportedGraphError` for a node without a kernel."""
    constant = constant_nodes(graph_module.graph)
    nodes = [node for node in graph_module.graph.nodes if node.op == "call_function" and node not in constant]
    needed = _ancestors(graph_module.graph.output_node().all_input_nodes)
    unmasked = [node for node in nodes if node in needed]
    attentions = [position for position, node in enumerate(unmasked) if is_call(node, ATTENTION)]
    if not attentions:
        raise UnsupportedGraphError("the graph has no attention, so there is nothing to keep between tokens")
    shared, last = Shared(options), attentions[-1]
    functions = [
        _whole("decode", 1, nodes, shared, "logits"),
        _prefill(unmasked, last, shared),
        _prefill_last(unmasked, last, shared),
        _whole("score", options.chunk, unmasked, shared, "logits.score"),
    ]
    if options.sequences > 1:
        functions.append(_whole("batch", options.sequences, nodes, shared, "logits.batch"))
    program = Program(options.context, options.chunk, dimension(nodes[-1]), len(attentions), options.sequences)
    program.state, program.ffn = shared.state, shared.ffn
    program.logits = {function.name: function.logits for function in functions if function.name != "prefill"}
    _place(program, functions)
    return Lowered(program, shared.kernels, shared.weights)


def _whole(name: str, rows: int, nodes: Sequence[Node], shared: Shared, logits: str) -> Function:
    function = Function(name, rows, shared, logits)
    for node in nodes:
        lower_node(node, function)
    return function


def _prefill(nodes: Sequence[Node], last: int, shared: Shared) -> Function:
    """All that the last layer's keys and values depend on; what that layer makes of them is nobody's input."""
    function = Function("prefill", shared.options.chunk, shared, "logits")
    values = arguments(nodes[last])
    needed = _ancestors([values["k"], values["v"]])
    for node in nodes[:last]:
        if node in needed:
            lower_node(node, function)
    extend_cache(nodes[last], function)
    return function


def _prefill_last(nodes: Sequence[Node], last: int, shared: Shared) -> Function:
    function = Function("prefill_last", shared.options.chunk, shared, "logits")
    for node in nodes[: last + 1]:
        lower_node(node, function)
    tail = nodes[last + 1 :]
    for node in _crossing(nodes[: last + 1], tail):
        kernel = shared.kernel(kernels.take_last, dim=dimension(node), rows=function.rows)
        row = function.buffer(f"{node.name}.last", "float32", (1, dimension(node)))
        function.call(kernel, {"x": function.values[node], "y": row}, op="take_last")
        function.values[node] = row
    function.rows = 1
    for node in tail:
        lower_node(node, function)
    return function


def _crossing(head: Sequence[Node], tail: Sequence[Node]) -> list[Node]:
    """The values that `tail` takes from `head`, each once, in order of use."""
    inside = set(head)
    used = dict.fromkeys(source for node in tail for source in node.all_input_nodes)
    for source in used:
        if source.op == "placeholder":
            raise UnsupportedGraphError(f"the graph uses its input {source.name} after the last attention")
    return [source for source in used if source in inside]


def _ancestors(nodes: Sequence[Node]) -> set[Node]:
    """`nodes` and all that they depend on where every neuron is computed: not by way of a predictor."""
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found and not is_call(node, PREDICT):
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def _place(program: Program, functions: Sequence[Function]) -> None:
    """Gives every buffer its offset. Functions never run at the same time, so their activations share memory."""
    program.buffers, base = _reserved(program)
    program.arena_bytes = base
    for function in functions:
        planned, end = plan_buffers(function.calls, function.buffers, base)
        program.buffers.update(planned)
        program.arena_bytes = max(program.arena_bytes, end)
        program.functions[function.name] = function.calls


def _reserved(program: Program) -> tuple[dict[str, Tensor], int]:
    """Buffers with a place of their own: inputs, statistics and outputs."""
    rows = max(program.chunk, program.sequences)
    statistics = ("int64", (max(1, len(program.ffn)), 2))
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "step": ("int32", STEP_SHAPE),
        "tokens": ("int32", (rows,)),
        "positions": ("int32", (rows,)),
        "slots": ("int32", (rows,)),
        "stats": statistics,
        "stats.unused": ("int64", (2,)),
        "logits": ("float32", (1, program.vocab)),
        "logits.score": ("float32", (program.chunk, program.vocab)),
    }
    if program.sequences > 1:
        shapes |= {"stats.batch": statistics, "logits.batch": ("float32", (program.sequences, program.vocab))}
    buffers, offset = {}, 0
    for name, (dtype, shape) in shapes.items():
        buffers[name] = Tensor(dtype, shape, offset)
        offset = align(offset + tensor_bytes(dtype, shape))
    return buffers, offset
