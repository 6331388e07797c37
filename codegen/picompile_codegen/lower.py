"""Lowering: the quantized graph becomes calls of kernels over planned buffers.

1. Every node becomes one or two calls; weights are entered into the table of packed tensors; nothing is read yet.
2. This happens four times, because a program has four functions:
   `decode`        one token
   `prefill`       a chunk of the prompt, only as far as the KV cache needs it
   `prefill_last`  the last chunk: everything after the last attention runs for the last token alone
   `score`         a chunk with logits for every token, for perplexity
3. The activations of each function get places in one arena.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from picompile_passes.errors import UnsupportedGraphError
from torch.fx import GraphModule, Node

from picompile_codegen import kernels
from picompile_codegen.kernels import Kernel
from picompile_codegen.packing import Evaluate, Matrix, WeightTable
from picompile_codegen.plan_buffers import align, plan_buffers
from picompile_codegen.program import Arg, Call, FfnPart, Program, Tensor, tensor_bytes

_OPS = torch.ops.picompile


@dataclass(frozen=True)
class LowerOptions:
    """What the graph does not say. `context` and `chunk` in tokens; `kv_dtype` float16 or float32."""

    context: int
    chunk: int
    kv_dtype: str


@dataclass(frozen=True)
class Lowered:
    """A program, the kernels it calls and the tensors it reads."""

    program: Program
    kernels: tuple[Kernel, ...]
    weights: WeightTable


@dataclass
class _Shared:
    """What the four functions have in common."""

    options: LowerOptions
    weights: WeightTable = field(default_factory=WeightTable)
    kernels: dict[str, Kernel] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    ffn: list[FfnPart] = field(default_factory=list)


@dataclass
class _Function:
    """One function under construction: its calls, its buffers, and which buffer holds the value of which node."""

    name: str
    rows: int
    shared: _Shared
    logits: str
    calls: list[Call] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    values: dict[Node, Arg] = field(default_factory=dict)

    def buffer(self, hint: str, dtype: str, shape: tuple[int, ...]) -> Arg:
        name = f"{self.name}.{len(self.buffers)}.{hint}"
        self.buffers[name] = Tensor(dtype, shape)
        return Arg("buffer", name)

    def call(
        self, kernel: Kernel, bindings: dict[str, Arg | Matrix], *, op: str, layer: int | None = None
    ) -> None:
        """Appends a call: kernel parameters are bound by name, scratch is made as the kernel asks for it."""
        self.shared.kernels.setdefault(kernel.name, kernel)
        args: list[Arg] = []
        for parameter in kernel.params:
            name, _, part = parameter.partition(".")
            if parameter in kernel.scratch:
                dtype, shape = kernel.scratch[parameter]
                args.append(self.buffer(parameter, dtype, tuple(shape)))
                continue
            bound = bindings[name]
            args.append(bound.view(part) if isinstance(bound, Matrix) else bound)
        weight_bytes = sum(bound.bytes for bound in bindings.values() if isinstance(bound, Matrix))
        self.calls.append(Call(kernel.name, tuple(args), op, layer, weight_bytes))


def _dimension(node: Node) -> int:
    return int(node.meta["val"].shape[-1])


def _node(argument: Any) -> Node:
    if not isinstance(argument, Node):
        raise TypeError(f"expected a node, got {argument!r}")
    return argument


def _lower_embedding(node: Node, function: _Function) -> None:
    ids, weight, offset = node.args
    matrix = function.shared.weights.matrix(_node(weight))
    dim = _dimension(node)
    kernel = kernels.embedding(
        format=matrix.format, vocab=matrix.rows, dim=dim, rows=function.rows, offset=int(offset)  # type: ignore[call-overload]
    )
    output = function.buffer(node.name, "float32", (function.rows, dim))
    source = Arg("buffer", _node(ids).name, shape=(function.rows,))
    function.call(kernel, {"step": _STEP, "ids": source, "w": matrix, "y": output}, op="embedding")
    # A lookup reads one row a token, not the table.
    function.calls[-1] = replace(function.calls[-1], weight_bytes=matrix.row_bytes)
    function.values[node] = output


_STEP = Arg("buffer", "step")


def _lower_linear(node: Node, function: _Function) -> None:
    x, weight, bias = node.args
    matrix = function.shared.weights.matrix(_node(weight))
    size, depth = _dimension(node), _dimension(_node(x))
    kernel = kernels.linear(format=matrix.format, n=size, k=depth, rows=function.rows, bias=bias is not None)
    is_head = any(user.op == "output" for user in node.users)
    output = Arg("buffer", function.logits) if is_head else function.buffer(node.name, "float32", (function.rows, size))
    bindings: dict[str, Arg | Matrix] = {"step": _STEP, "x": function.values[_node(x)], "w": matrix, "y": output}
    if bias is not None:
        bindings["bias"] = function.shared.weights.vector(_node(bias))
    function.call(kernel, bindings, op="head" if is_head else "linear", layer=node.meta.get("layer"))
    function.values[node] = output


def _lower_norm(node: Node, function: _Function) -> None:
    dim = _dimension(node)
    output = function.buffer(node.name, "float32", (function.rows, dim))
    bindings: dict[str, Arg | Matrix] = {"step": _STEP, "x": function.values[_node(node.args[0])], "y": output}
    if node.target is _OPS.rms_norm.default:
        _, weight, eps = node.args
        kernel = kernels.rms_norm(dim=dim, rows=function.rows, eps=float(eps))  # type: ignore[arg-type]
        bias = None
    else:
        _, weight, bias, eps = node.args
        kernel = kernels.layer_norm(
            dim=dim, rows=function.rows, eps=float(eps), weight=weight is not None, bias=bias is not None  # type: ignore[arg-type]
        )
    for name, operand in (("weight", weight), ("bias", bias)):
        if operand is not None:
            bindings[name] = function.shared.weights.vector(_node(operand))
    function.call(kernel, bindings, op="norm")
    function.values[node] = output


def _rotary_table(frequency: Node, scaling: float, context: int, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def produce(evaluate: Evaluate) -> torch.Tensor:
        positions = torch.arange(context, dtype=torch.float32).unsqueeze(1)
        return function(positions * evaluate(frequency).to(torch.float32)) * scaling

    return produce


def _lower_rotary(node: Node, function: _Function) -> None:
    x, _, frequency, heads, scaling = node.args
    heads, scaling, context = int(heads), float(scaling), function.shared.options.context  # type: ignore[call-overload, arg-type]
    head_dim = _dimension(node) // heads
    output = function.buffer(node.name, "float32", (function.rows, _dimension(node)))
    bindings: dict[str, Arg | Matrix] = {"step": _STEP, "x": function.values[_node(x)], "y": output}
    for name, of in (("cos", torch.cos), ("sin", torch.sin)):
        table = _rotary_table(_node(frequency), scaling, context, of)
        label = f"rotary.{name}.{_node(frequency).target}.{scaling!r}"
        bindings[name] = function.shared.weights.computed(label, (context, head_dim // 2), table)
    kernel = kernels.rotary(heads=heads, head_dim=head_dim, rows=function.rows, context=context)
    function.call(kernel, bindings, op="rotary")
    function.values[node] = output


def _lower_cache(node: Node, function: _Function) -> tuple[Arg, Arg]:
    """Writes k and v of this step into the layer's cache; returns both caches."""
    options, layer, kv_heads = function.shared.options, int(node.args[6]), int(node.args[4])  # type: ignore[call-overload]
    caches = []
    for name, operand in (("k", _node(node.args[1])), ("v", _node(node.args[2]))):
        head_dim = _dimension(operand) // kv_heads
        cache = f"{name}.{layer}"
        function.shared.state.setdefault(cache, Tensor(options.kv_dtype, (kv_heads, options.context, head_dim)))
        kernel = kernels.cache_write(
            kv_heads=kv_heads,
            head_dim=head_dim,
            context=options.context,
            rows=function.rows,
            kv_dtype=options.kv_dtype,
        )
        bindings: dict[str, Arg | Matrix] = {
            "step": _STEP,
            "x": function.values[operand],
            "cache": Arg("state", cache),
        }
        function.call(kernel, bindings, op="cache", layer=layer)
        caches.append(Arg("state", cache))
    return caches[0], caches[1]


def _lower_attention(node: Node, function: _Function) -> None:
    q, k, v, heads, kv_heads, scale, layer, window = node.args
    k_cache, v_cache = _lower_cache(node, function)
    heads, kv_heads = int(heads), int(kv_heads)  # type: ignore[call-overload]
    options = function.shared.options
    kernel = kernels.attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_dimension(_node(q)) // heads,
        value_dim=_dimension(_node(v)) // kv_heads,
        context=options.context,
        rows=function.rows,
        kv_dtype=options.kv_dtype,
        scale=float(scale),  # type: ignore[arg-type]
        window=int(window),  # type: ignore[call-overload]
    )
    output = function.buffer(node.name, "float32", (function.rows, _dimension(node)))
    bindings: dict[str, Arg | Matrix] = {
        "step": _STEP,
        "q": function.values[_node(q)],
        "k_cache": k_cache,
        "v_cache": v_cache,
        "y": output,
    }
    function.call(kernel, bindings, op="attention", layer=int(layer))  # type: ignore[call-overload]
    function.values[node] = output


def _lower_sparse_ffn(node: Node, function: _Function) -> None:
    x, mask, _, gate, up, down, gate_bias, up_bias, down_bias, activation, up_activation = node.args
    kind = str(_node(mask).args[2])
    if kind not in ("exact", "none"):
        raise UnsupportedGraphError(f"{node.name}: no CPU kernel for predictor kind {kind!r}")
    layer, part = int(node.meta["layer"]), str(node.meta.get("device", "all"))
    weights, suffix = function.shared.weights, "" if part == "all" else f".{part}"
    decides = gate if gate is not None else up
    parts = [_node(operand) for operand in (gate, up, down) if operand is not None]
    bindings: dict[str, Arg | Matrix] = {"step": _STEP, "x": function.values[_node(x)]}
    if kind == "exact":
        bindings["decide_w"] = weights.matrix(_node(decides))
        parts = [operand for operand in parts if operand is not decides]
    neurons = weights.bundle(f"layers.{layer}.ffn.neurons{suffix}", parts)
    bindings["neuron_w"] = neurons
    for name, bias in (("gate_bias", gate_bias), ("up_bias", up_bias), ("down_bias", down_bias)):
        if bias is not None:
            bindings[name] = weights.vector(_node(bias))
    bindings["stats"] = _statistics(function, FfnPart(layer, part, neurons.rows // len(parts), kind, len(function.shared.ffn)))
    bindings["y"] = function.buffer(node.name, "float32", (function.rows, _dimension(node)))
    kernel = kernels.ffn(
        kind="exact" if kind == "exact" else "dense",
        format=neurons.format,
        neurons=neurons.rows // len(parts),
        dim=_dimension(node),
        rows=function.rows,
        gated=gate is not None,
        activation=str(activation),
        up_activation=str(up_activation),
        gate_bias=gate_bias is not None,
        up_bias=up_bias is not None,
        down_bias=down_bias is not None,
    )
    function.call(kernel, bindings, op="ffn", layer=layer)
    output = bindings["y"]
    if isinstance(output, Arg):
        function.values[node] = output


def _statistics(function: _Function, part: FfnPart) -> Arg:
    """Where this kernel counts neurons. Only decode counts for the record; other functions share a row nobody reads."""
    if function.name != "decode":
        return Arg("buffer", "stats.unused")
    function.shared.ffn.append(part)
    return Arg("buffer", "stats", shape=(2,), offset=part.stats_row * 16)


def _lower_add(node: Node, function: _Function) -> None:
    a, b = function.values[_node(node.args[0])], function.values[_node(node.args[1])]
    output = function.buffer(node.name, "float32", (function.rows, _dimension(node)))
    kernel = kernels.add(dim=_dimension(node), rows=function.rows)
    function.call(kernel, {"step": _STEP, "a": a, "b": b, "y": output}, op="add")
    function.values[node] = output


_HANDLERS: dict[Any, Callable[[Node, _Function], None]] = {
    _OPS.embedding.default: _lower_embedding,
    _OPS.linear.default: _lower_linear,
    _OPS.rms_norm.default: _lower_norm,
    _OPS.layer_norm.default: _lower_norm,
    _OPS.rotary.default: _lower_rotary,
    _OPS.attention.default: _lower_attention,
    _OPS.sparse_ffn.default: _lower_sparse_ffn,
    _OPS.predict.default: lambda node, function: None,  # part of the kernel of the sparse_ffn that uses it
    torch.ops.aten.add.Tensor: _lower_add,
}


def _lower_node(node: Node, function: _Function) -> None:
    handler = _HANDLERS.get(node.target)
    if handler is None:
        raise UnsupportedGraphError(f"{node.name}: no kernel for {node.target}")
    handler(node, function)


def _ancestors(nodes: Sequence[Node]) -> set[Node]:
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def _token_path(graph_module: GraphModule) -> list[Node]:
    """The nodes that depend on an input, in order; the others are constant subgraphs."""
    varying: set[Node] = set()
    for node in graph_module.graph.nodes:
        if node.op == "placeholder" or any(source in varying for source in node.all_input_nodes):
            varying.add(node)
    return [node for node in graph_module.graph.nodes if node in varying and node.op == "call_function"]


def _lower_functions(nodes: list[Node], shared: _Shared) -> list[_Function]:
    chunk = shared.options.chunk
    last = max((i for i, node in enumerate(nodes) if node.target is _OPS.attention.default), default=-1)
    if last < 0:
        raise UnsupportedGraphError("the graph has no attention")

    decode = _Function("decode", 1, shared, "logits")
    score = _Function("score", chunk, shared, "logits.score")
    for function in (decode, score):
        for node in nodes:
            _lower_node(node, function)

    prefill = _Function("prefill", chunk, shared, "logits.score")
    needed = _ancestors([_node(nodes[last].args[1]), _node(nodes[last].args[2])])
    for node in nodes[:last]:
        if node in needed:
            _lower_node(node, prefill)
    _lower_cache(nodes[last], prefill)

    return [decode, prefill, _lower_prefill_last(nodes, last, shared), score]


def _lower_prefill_last(nodes: list[Node], last: int, shared: _Shared) -> _Function:
    function = _Function("prefill_last", shared.options.chunk, shared, "logits")
    for node in nodes[: last + 1]:
        _lower_node(node, function)
    tail = nodes[last + 1 :]
    placeholders = (node for node in nodes[0].graph.nodes if node.op == "placeholder")
    before = {*nodes[: last + 1], *placeholders}
    crossing = dict.fromkeys(
        source for node in tail for source in node.all_input_nodes if source in before
    )
    for node in crossing:
        if node.op == "placeholder":
            raise UnsupportedGraphError(f"{node.name} is used after the last attention")
        dim = _dimension(node)
        row = function.buffer(f"{node.name}.last", "float32", (1, dim))
        kernel = kernels.take_last(dim=dim, rows=function.rows)
        function.call(kernel, {"step": _STEP, "x": function.values[node], "y": row}, op="take_last")
        function.values[node] = row
    function.rows = 1
    for node in tail:
        _lower_node(node, function)
    return function


def _reserved(program: Program, stats_rows: int) -> tuple[dict[str, Tensor], int]:
    """Buffers with a place of their own: inputs, outputs and statistics."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "step": ("int32", (8,)),
        "tokens": ("int32", (program.chunk,)),
        "positions": ("int32", (program.chunk,)),
        "stats": ("int64", (max(1, stats_rows), 2)),
        "stats.unused": ("int64", (2,)),
        "logits": ("float32", (1, program.vocab)),
        "logits.score": ("float32", (program.chunk, program.vocab)),
    }
    buffers, offset = {}, 0
    for name, (dtype, shape) in shapes.items():
        buffers[name] = Tensor(dtype, shape, offset)
        offset = align(offset + tensor_bytes(dtype, shape))
    return buffers, offset


def lower(graph_module: GraphModule, options: LowerOptions) -> Lowered:
    """Lowers a graph of the quantized stage. Raises `UnsupportedGraphError` for a node without a kernel."""
    nodes = _token_path(graph_module)
    shared = _Shared(options)
    functions = _lower_functions(nodes, shared)
    layers = sum(node.target is _OPS.attention.default for node in nodes)
    program = Program(options.context, options.chunk, _dimension(nodes[-1]), layers)
    program.buffers, base = _reserved(program, len(shared.ffn))
    program.arena_bytes = base
    for function in functions:
        planned, end = plan_buffers(function.calls, function.buffers, base)
        program.buffers.update(planned)
        program.arena_bytes = max(program.arena_bytes, end)
        program.functions[function.name] = function.calls
    program.state = shared.state
    program.ffn = shared.ffn
    program.logits = {"decode": "logits", "prefill_last": "logits", "score": "logits.score"}
    return Lowered(program, tuple(shared.kernels.values()), shared.weights)
