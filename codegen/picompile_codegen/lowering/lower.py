"""Lowering: the quantized graph becomes calls of kernels over planned buffers.

1. Every node becomes one or two calls; weights are entered into the table of packed tensors; nothing is read yet.
2. This happens for each of the functions that a program has:
   `decode`        one token
   `prefill`       a chunk of the prompt, only as far as the state needs it
   `prefill_last`  the last chunk: everything after the last operator with state runs for the last token alone
   `score`         a chunk with logits for every token, for perplexity
   `score_masked`  the same with the neurons that predictors name, if it is asked for
   `batch`         several rows, each a token of some sequence, where the state holds several sequences, or tokens
                   of a draft are to be checked
   `decode` and `batch` have masks of neurons made; the others compute every neuron, and leave out what predictors
   alone need.
3. The activations of each function get places in an arena, one for each memory.

Where there is an accelerator, calls are made for both devices, each in its order (see `placement.py`, `transfer.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from torch.fx import GraphModule, Node

from picompile_codegen.build.isa import Isa
from picompile_codegen.cpu.kernel import Kernel, WrittenKernel
from picompile_codegen.lowering.arena import Lifetime, align
from picompile_codegen.lowering.ffn import makes_mask
from picompile_codegen.lowering.function import (
    DECODING,
    HOST,
    Bindings,
    Function,
    LowerOptions,
    Shared,
    dimension,
    plan_buffers,
)
from picompile_codegen.lowering.fusion import Fusions, find_fusions, joined_linears
from picompile_codegen.lowering.neuron_bounds import neuron_bounds
from picompile_codegen.lowering.operators import lower_node, lower_state
from picompile_codegen.lowering.ops import top_logits_shapes
from picompile_codegen.lowering.packing import WeightTable
from picompile_codegen.lowering.placement import place
from picompile_codegen.lowering.program import Device, LoweredProgram, Memory, ProgramTensor, tensor_bytes
from picompile_codegen.lowering.shared_memory import shared_overlap
from picompile_codegen.lowering.slices import STAGING
from picompile_codegen.lowering.state import state_operands
from picompile_codegen.lowering.transfer import publish
from picompile_codegen.registry import BACK_ENDS
from picompile_codegen.specs import FLAG_SHAPE, STEP_SHAPE, KernelSpec, TakeLastSpec
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.graph.layers import operator_part
from picompile_passes.graph.nodes import arguments, constant_nodes, is_call
from picompile_passes.graph.operands import ROUTE, state_of

__all__ = ["LowerOptions", "Lowered", "lower"]


@dataclass(frozen=True)
class Lowered:
    """A program, the tensors it reads, and the kernels it calls by their specs, the host's and the accelerator's."""

    program: LoweredProgram
    built: Mapping[KernelSpec, WrittenKernel]
    accelerator_built: Mapping[KernelSpec, WrittenKernel]
    weights: WeightTable

    @property
    def kernels(self) -> tuple[WrittenKernel, ...]:
        """The kernels for the instruction set that was current when the graph was lowered."""
        return tuple(self.built.values())

    def kernels_for(self, isa: Isa) -> tuple[Kernel, ...]:
        """Return the host's kernels for `isa`."""
        return BACK_ENDS[HOST].kernels_for(isa, self.built)


def lower(graph_module: GraphModule, options: LowerOptions) -> Lowered:
    """Lower a graph of the quantized stage. Raises `UnsupportedGraphError` for a node without a kernel."""
    constant = constant_nodes(graph_module.graph)
    nodes = [node for node in graph_module.graph.nodes if node.op == "call_function" and node not in constant]
    needed = _ancestors(graph_module.graph.output_node().all_input_nodes)
    unmasked = [node for node in nodes if node in needed]
    mixers = [position for position, node in enumerate(unmasked) if state_of(node)]
    if not mixers:
        raise UnsupportedGraphError("no operator of the graph keeps anything between tokens")
    if options.accelerator is not None and any(is_call(node, ROUTE) for node in nodes):
        raise UnsupportedGraphError("the CPU alone computes experts so far; compile for a target without a GPU")
    shared, last = Shared(options, WeightTable(options.panels and options.back_end.panels)), mixers[-1]
    shared.weights.find_layouts(nodes)
    if not shared.weights.panels:  # a GPU reads them
        shared.joined = joined_linears(nodes)
        for group in shared.joined.values():
            shared.weights.join(
                [arguments(node)["weight"] for node in group], [arguments(node)["bias"] for node in group]
            )
    if options.accelerator is not None and options.back_end.counts:
        decoding, prompts = _devices("decode", nodes, shared), _devices("prefill", nodes, shared)
        shared.bounds = neuron_bounds(nodes, decoding, prompts)
    decode = _whole("decode", nodes, shared)
    shared.resident = frozenset(
        arg.name for call in decode.calls if call.device == "accelerator" for arg in call.args if arg.space == "weight"
    )
    functions = [decode]
    if not options.only_decoding:
        functions += [
            _prefill(unmasked, last, shared),
            _prefill_last(unmasked, last, shared),
            _whole("score", unmasked, shared),
        ]
    if options.scores_masks and options.accelerator is None and _has_chunk_masks(nodes, options.chunk):
        functions.append(_whole("score_masked", nodes, shared))
    if options.batch_rows > 1:
        functions.append(_whole("batch", nodes, shared))
    for function in functions:
        function.read_inputs(max(options.chunk, options.batch_rows))
    vocab, layers = dimension(nodes[-1]), len({unmasked[each].meta["layer"] for each in mixers})
    program = LoweredProgram(
        context=options.context,
        chunk=options.chunk,
        vocab=vocab,
        layers=layers,
        sequences=options.sequences,
        batch_rows=options.batch_rows,
        kv_dtype=options.kv_dtype,
    )
    program.state, program.ffn, program.streamed = shared.state, shared.ffn, list(shared.streamed)
    program.logits = {function.name: function.logits for function in functions if function.name != "prefill"}
    program.top_logits = {function.name: function.top_logits for function in functions if function.top_logits}
    _place(program, functions, shared)
    return Lowered(program, shared.kernels, shared.accelerator_kernels, shared.weights)


def _has_chunk_masks(nodes: Sequence[Node], chunk: int) -> bool:
    """Return whether there are predictors, and a kernel of each for chunks."""
    predictors = [node for node in nodes if operator_part(node) == "mask"]
    return bool(predictors) and all(makes_mask(node, chunk) for node in predictors)


def _whole(name: str, nodes: Sequence[Node], shared: Shared) -> Function:
    function = _begin(name, nodes, shared)
    _lower_all(nodes, function)
    return function


def _begin(name: str, nodes: Sequence[Node], shared: Shared) -> Function:
    """Return a function without calls, with the devices of `nodes`."""
    rows = {"decode": 1, "batch": shared.options.batch_rows}.get(name, shared.options.chunk)
    logits = {"score": "logits.score", "score_masked": "logits.score", "batch": "logits.batch"}.get(name, "logits")
    devices = _devices(name, nodes, shared)
    at_home = devices if name in DECODING else _devices("decode", nodes, shared)
    lent = frozenset(node for node in nodes if devices[node] != at_home[node])
    return Function(name, rows, shared, logits=logits, devices=devices, lent=lent)


def _devices(name: str, nodes: Sequence[Node], shared: Shared) -> dict[Node, Device]:
    if shared.options.accelerator is None:
        return dict.fromkeys(nodes, "host")
    return place(nodes, shared.options.placement, streams=name not in DECODING)


def _lower_all(nodes: Sequence[Node], function: Function) -> None:
    """Append the calls of `nodes`, those of the host as early as they can be.

    So what the host needs is sent before the accelerator begins with what takes long, and its result is asked for
    after.
    """
    ordered, fusions = _host_first(nodes, function.devices), Fusions()
    if function.shared.options.accelerator is not None and function.shared.options.back_end.fuses:
        joined = function.shared.joined
        fusions = find_fusions(ordered, function.devices, joined, rows=function.rows, lent=function.lent)
    for node in ordered:
        if node in fusions.inside:
            continue
        function.node, function.device = node, function.devices[node]
        made = fusions.lower(node, function)
        if made is None:
            lower_node(node, function)
        for each in made or [node]:
            if function.has(each):
                publish(each, function)


def _host_first(nodes: Sequence[Node], devices: Mapping[Node, Device]) -> list[Node]:
    """Return `nodes` in an order that keeps dependencies.

    Of the nodes that can come next, those of the host come first. Of those of the accelerator the ones come first that
    wait for fewer values of the host, one after the other: so a prediction from the layer before is made while the host
    still computes that layer. Among equals the one that was first comes first.
    """
    inside = set(nodes)
    waits_for = {node: sum(source in inside for source in node.all_input_nodes) for node in nodes}
    places, arrivals = {node: place for place, node in enumerate(nodes)}, _arrivals(nodes, devices)

    def key(node: Node) -> tuple[int, int]:
        return (-1 if devices[node] == "host" else arrivals[node]), places[node]

    ready = [key(node) for node in nodes if not waits_for[node]]
    heapify(ready)
    ordered = []
    while ready:
        node = nodes[heappop(ready)[1]]
        ordered.append(node)
        for user in node.users:
            if user in inside:
                waits_for[user] -= 1
                if not waits_for[user]:
                    heappush(ready, key(user))
    return ordered


def _arrivals(nodes: Sequence[Node], devices: Mapping[Node, Device]) -> dict[Node, int]:
    """Return how many values of the host each node waits for, one after the other."""
    found: dict[Node, int] = {}
    for node in nodes:
        crosses = devices[node] == "accelerator"
        sources = (source for source in node.all_input_nodes if source in found)
        found[node] = max((found[each] + (crosses and devices[each] == "host") for each in sources), default=0)
    return found


def _prefill(nodes: Sequence[Node], last: int, shared: Shared) -> Function:
    """Lower all that the state of the last mixer depends on; no node needs what that mixer makes of it."""
    function = _begin("prefill", nodes, shared)
    needed = _ancestors(state_operands(nodes[last]))
    _lower_all([node for node in nodes[:last] if node in needed], function)
    function.node, function.device = nodes[last], function.devices[nodes[last]]
    lower_state(nodes[last], function)
    return function


def _prefill_last(nodes: Sequence[Node], last: int, shared: Shared) -> Function:
    function = _begin("prefill_last", nodes, shared)
    head, tail = nodes[: last + 1], nodes[last + 1 :]
    crossing = _crossing(head, tail)
    _lower_all(head, function)
    rows, function.rows = function.rows, 1
    for node in crossing:
        function.device = function.devices[node]
        bindings: Bindings = {"x": function.value(node)}
        # What the other device has is all rows.
        function.values = {key: value for key, value in function.values.items() if key[0] is not node}
        bindings["y"] = function.result(node)
        function.call(TakeLastSpec(dimension(node), rows), bindings)
        publish(node, function)
    _lower_all(tail, function)
    return function


def _crossing(head: Sequence[Node], tail: Sequence[Node]) -> list[Node]:
    """Return the values that `tail` takes from `head`, each once, in order of use."""
    inside = set(head)
    used = dict.fromkeys(source for node in tail for source in node.all_input_nodes)
    for source in used:
        if source.op == "placeholder":
            raise UnsupportedGraphError(f"the graph uses its input {source.name} after the last operator with state")
    return [source for source in used if source in inside]


def _ancestors(nodes: Sequence[Node]) -> set[Node]:
    """Return `nodes` and all that they depend on where every neuron is computed, that is without predictors."""
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found and operator_part(node) != "mask":
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def _place(program: LoweredProgram, functions: Sequence[Function], shared: Shared) -> None:
    """Give every buffer its offset. Functions never run at the same time, so their activations share memory."""
    program.buffers, bases = _reserved(program, shared)
    ends = dict(bases)
    for function in functions:
        for memory, base in bases.items():
            mine = {name: tensor for name, tensor in function.buffers.items() if tensor.memory == memory}
            overlap = _overlap_in_shared(function) if memory == "shared" else Lifetime.overlaps
            planned, end = plan_buffers(function.calls, mine, base, overlap)
            program.buffers.update(planned)
            ends[memory] = max(ends[memory], end)
        program.functions[function.name] = function.calls
    program.arena_bytes = ends["host"]
    program.accelerator_arena_bytes, program.shared_arena_bytes = ends.get("accelerator", 0), ends.get("shared", 0)


def _overlap_in_shared(function: Function) -> Callable[[Lifetime, Lifetime], bool]:
    """Return the predicate for two buffers in shared memory that may be in use at the same time.

    Where tokens are decoded each has a place of its own: counts say that there is nothing to wait for, so little could
    be used again.
    """
    if function.name in DECODING:
        return lambda one, other: True
    kernels: dict[tuple[Device, str], WrittenKernel] = {
        ("host", kernel.name): kernel for kernel in function.shared.kernels.values()
    }
    kernels |= {("accelerator", kernel.name): kernel for kernel in function.shared.accelerator_kernels.values()}
    return shared_overlap(function.calls, kernels)


def _reserved(program: LoweredProgram, shared: Shared) -> tuple[dict[str, ProgramTensor], dict[Memory, int]]:
    """Return the buffers with a place of their own (inputs, statistics, outputs), and where each memory is free after
    them."""
    rows, parts = max(program.chunk, program.batch_rows), max(1, shared.stats_rows)
    inputs: dict[str, tuple[int, ...]] = {"step": STEP_SHAPE, "tokens": (rows,), "positions": (rows,), "slots": (rows,)}
    counts: dict[str, tuple[int, ...]] = {"stats": (parts, 2), "stats.unused": (2,)}
    if program.batch_rows > 1:
        counts["stats.batch"] = (parts, 2)
    hybrid = bool(shared.accelerator_kernels)  # nothing may be left for the accelerator
    place_of = _Offsets()
    for name, shape in inputs.items():
        place_of.add(name, "int32", shape, "shared" if hybrid else "host")
    for name, shape in counts.items():
        place_of.add(name, "int64", shape, "host")
    _reserve_logits(program, "accelerator" if shared.options.placement.head and hybrid else "host", place_of)
    if hybrid:
        for name, shape in inputs.items():
            place_of.add(f"{name}.accelerator", "int32", shape, "accelerator")
        for name, shape in counts.items():
            place_of.add(f"{name}.accelerator", "int64", shape, "accelerator")
        place_of.add("flags", "int32", (max(1, shared.transfers), *FLAG_SHAPE), "shared")
        place_of.add("abandoned", "int32", FLAG_SHAPE, "shared")
        if tickets := max(kernel.tickets for kernel in shared.accelerator_kernels.values()):
            place_of.add("tickets", "int32", (tickets,), "accelerator")
    for name in STAGING if shared.staging_bytes else ():
        place_of.add(name, "uint8", (shared.staging_bytes,), "accelerator")
    return place_of.buffers, place_of.ends


def _reserve_logits(program: LoweredProgram, memory: Memory, place_of: "_Offsets") -> None:
    """Reserve logits in `memory`, where the head makes them, and shared memory for the highest of them."""
    rows = {"logits": 1, "logits.score": program.chunk}
    if program.batch_rows > 1:
        rows["logits.batch"] = program.batch_rows
    kept = {program.logits[function] for function in program.top_logits}
    for name, count in rows.items():
        place_of.add(name, "float32", (count, program.vocab), memory)
        for highest, dtype, shape in top_logits_shapes(name, count, program.vocab) if name in kept else ():
            place_of.add(highest, dtype, shape, "shared")


class _Offsets:
    """Places buffers one behind the other, in each memory."""

    def __init__(self) -> None:
        self.buffers: dict[str, ProgramTensor] = {}
        self.ends: dict[Memory, int] = {"host": 0}

    def add(self, name: str, dtype: str, shape: tuple[int, ...], memory: Memory) -> None:
        offset = self.ends.get(memory, 0)
        self.buffers[name] = ProgramTensor(dtype, shape, offset, memory)
        self.ends[memory] = align(offset + tensor_bytes(dtype, shape))
