"""The operators of a model given by its numbers, in the order and with the tensors that lowering gives them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from picompile.placement.shape_outline import ModelOutline
from picompile_codegen.lowering.arena import align
from picompile_passes.formats import FORMATS, GROUP, head_format, predictor_format

# Predictors that a kernel of their own makes a mask by.
LEARNED = ("learned", "learned-relu")
# A bit for each column, in blocks of 256 columns (`picompile_codegen.signs`).
_SIGN_BLOCK_COLUMNS = 256
_FLOAT_BYTES = 4
# TVM's indices have 32 bits: no kernel takes a larger tensor.
_MOST_ELEMENTS = 2**31 - 1
# Elements of caches by their dtype; in q8 their scales, float16, come besides.
ITEM_BYTES = {"float16": 2, "float32": 4, "q8": 1}


@dataclass(frozen=True)
class ShapePacking:
    """How the outline is packed: weight format, predictor kind and rank, context, cache dtype, tokens of a chunk."""

    quant: str
    predictor: str
    rank: int
    context: int
    kv_dtype: str
    chunk: int
    predictor_quant: str = "auto"

    @property
    def predictor_format(self) -> str:
        """The format of a predictor's own matrices, as `Quantize` chooses it."""
        return predictor_format(self.quant, self.predictor_quant)

    @property
    def head_format(self) -> str:
        """The format of the output head and of embeddings, as `Quantize` chooses it."""
        return head_format(self.quant)

    @property
    def makes_mask(self) -> bool:
        """Whether a kernel of the predictor makes a mask."""
        return self.predictor in (*LEARNED, "sign")


@dataclass(frozen=True)
class ShapeNode:
    """One operator: `inputs` names the nodes it reads, `width` is the last dimension of its value.

    `tensors` has the packed tensors that it reads, by the kernel's parameter. The value is float32 but for masks.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    width: int
    tensors: Mapping[str, str] = field(default_factory=dict)


@dataclass
class ShapeGraph:
    """The operators of a model's first layers, and its tensors: bytes by name, and parameters by name.

    `has_kernels` is False where a tensor has more elements than a kernel can count.
    """

    outline: ModelOutline
    packing: ShapePacking
    nodes: list[ShapeNode] = field(default_factory=list)
    weight_bytes: dict[str, int] = field(default_factory=dict)
    cache_bytes: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    has_kernels: bool = True

    def parameter_count(self) -> int:
        """Return the parameters of all layers; those that are not in the graph are like the second."""
        in_graph = len(self.attentions())
        second = sum(count for name, count in self.parameters.items() if name.startswith("1."))
        return sum(self.parameters.values()) + (self.outline.layers - in_graph) * second

    def attentions(self) -> list[ShapeNode]:
        """Return the nodes of attention, one a layer."""
        return [node for node in self.nodes if node.op == "attention"]

    def add(
        self, name: str, op: str, inputs: Sequence[str], width: int, tensors: Mapping[str, str] | None = None
    ) -> str:
        """Append an operator; return its name."""
        self.nodes.append(ShapeNode(name, op, tuple(inputs), width, tensors or {}))
        return name

    def matrix(self, name: str, rows: int, columns: int, form: str | None = None, *, counts: bool = True) -> str:
        """Enter a packed matrix; return its name. `counts` says whether its elements are parameters of the model."""
        row_bytes = FORMATS[form or self.packing.quant].row_bytes(columns)
        self.weight_bytes[name] = rows * row_bytes
        self.require(rows, row_bytes // (2 if (form or self.packing.quant) == "f16" else 1))
        if counts:
            self.parameters[name] = rows * columns
        return name

    def vector(self, name: str, length: int, *, counts: bool = True) -> str:
        """Enter a float32 tensor, stored flat and padded; return its name."""
        self.weight_bytes[name] = align(length * _FLOAT_BYTES)
        self.require(length)
        if counts:
            self.parameters[name] = length
        return name

    def require(self, *shape: int) -> None:
        """Note whether a kernel can count the elements of a tensor."""
        self.has_kernels = self.has_kernels and prod(shape) <= _MOST_ELEMENTS


def sign_row_bytes(columns: int) -> int:
    """Return the bytes of a row's signs: whole blocks of columns, and whole cache lines."""
    return align(-(-columns // _SIGN_BLOCK_COLUMNS) * _SIGN_BLOCK_COLUMNS // 8)


def shape_graph(outline: ModelOutline, packing: ShapePacking, layers: int) -> ShapeGraph:
    """Return the graph of the first `layers` layers, with all that is in front of them and behind them."""
    graph = ShapeGraph(outline, packing)
    stream = _embedding(graph)
    for layer in range(layers):
        stream = _layer(graph, layer, stream)
    if outline.form.order != "post":
        stream = _norm(graph, "final_norm", stream)
    if outline.embedding_width != outline.hidden:
        stream = _linear(graph, "project_out", stream, outline.hidden, outline.embedding_width, bias=False)
    head = (
        "embedding"
        if outline.tied
        else graph.matrix("head", outline.vocab, outline.embedding_width, graph.packing.head_format)
    )
    graph.add("head", "head", [stream], outline.vocab, {"w": head})
    graph.require(packing.chunk, outline.vocab)
    return graph


def _embedding(graph: ShapeGraph) -> str:
    """Add the input of the first layer: token embeddings, plus those of positions if there is a table of them."""
    outline = graph.outline
    table = graph.matrix("embedding", outline.vocab, outline.embedding_width, graph.packing.head_format)
    stream = graph.add("embedding", "embedding", [], outline.embedding_width, {"w": table})
    if outline.positions:
        rows = graph.matrix("positions", outline.positions, outline.hidden, graph.packing.head_format)
        graph.add("positions", "embedding", [], outline.hidden, {"w": rows})
    if outline.embedding_width != outline.hidden:
        stream = _linear(graph, "project_in", stream, outline.embedding_width, outline.hidden, bias=False)
    return graph.add("embedded", "add", [stream, "positions"], outline.hidden) if outline.positions else stream


def _layer(graph: ShapeGraph, layer: int, stream: str) -> str:
    order, hidden = graph.outline.form.order, graph.outline.hidden
    if order == "post":
        attended = graph.add(f"{layer}.sum", "add", [stream, _attention(graph, layer, stream)], hidden)
        normed = _norm(graph, f"{layer}.norm", attended)
        summed = graph.add(f"{layer}.out", "add", [normed, _block(graph, layer, normed)], hidden)
        return _norm(graph, f"{layer}.block_norm", summed)
    normed = _norm(graph, f"{layer}.norm", stream)
    if order == "pre":
        attended = graph.add(f"{layer}.sum", "add", [stream, _attention(graph, layer, normed)], hidden)
        block = _block(graph, layer, _norm(graph, f"{layer}.block_norm", attended))
        return graph.add(f"{layer}.out", "add", [attended, block], hidden)
    for_block = _norm(graph, f"{layer}.block_norm", stream) if graph.outline.form.two_norms else normed
    attended = _attention(graph, layer, normed)
    both = graph.add(f"{layer}.sum", "add", [_block(graph, layer, for_block), attended], hidden)
    return graph.add(f"{layer}.out", "add", [stream, both], hidden)


def _norm(graph: ShapeGraph, name: str, x: str) -> str:
    hidden, form, tensors = graph.outline.hidden, graph.outline.form, {}
    if form.norm_weights:
        tensors["weight"] = graph.vector(f"{name}.weight", hidden)
        if not form.rms_norm:
            tensors["bias"] = graph.vector(f"{name}.bias", hidden)
    return graph.add(name, "norm", [x], hidden, tensors)


def _linear(graph: ShapeGraph, name: str, x: str, columns: int, rows: int, *, bias: bool) -> str:
    tensors = {"w": graph.matrix(f"{name}.weight", rows, columns)}
    if bias:
        tensors["bias"] = graph.vector(f"{name}.bias", rows)
    return graph.add(name, "linear", [x], rows, tensors)


def _attention(graph: ShapeGraph, layer: int, x: str) -> str:
    """Add the queries, keys and values of `x`, attention, and its projection; return the last name."""
    outline, form = graph.outline, graph.outline.form
    queries, keys = outline.heads * outline.head_dim, outline.kv_heads * outline.head_dim
    q, k, v = (
        _linear(graph, f"{layer}.{name}", x, outline.hidden, rows, bias=form.query_bias)
        for name, rows in (("q", queries), ("k", keys), ("v", keys))
    )
    tensors = {}
    if form.rotary:
        # All layers have the same tables of angles.
        size = graph.packing.context * (outline.head_dim // 2)
        tensors = {name: graph.vector(name, size, counts=False) for name in ("cos", "sin")}
        q = graph.add(f"{layer}.q_turned", "rotary", [q], queries, tensors)
        k = graph.add(f"{layer}.k_turned", "rotary", [k], keys, tensors)
    attended = graph.add(f"{layer}.attention", "attention", [q, k, v], queries, {**tensors, **_caches(graph, layer)})
    return _linear(graph, f"{layer}.o", attended, queries, outline.hidden, bias=form.output_bias)


def _caches(graph: ShapeGraph, layer: int) -> dict[str, str]:
    """Enter the caches of a layer, for one sequence; return them by the parameters of attention."""
    outline, found = graph.outline, {}
    rows, dtype = outline.kv_heads * graph.packing.context, graph.packing.kv_dtype
    parts = {"": (ITEM_BYTES[dtype], outline.head_dim)}
    if dtype == "q8":
        parts["_scales"] = (ITEM_BYTES["float16"], -(-outline.head_dim // GROUP))
    for side in ("k", "v"):
        for part, (item_bytes, width) in parts.items():
            parameter = f"{side}_cache{part}"
            found[parameter] = f"{layer}.{parameter}"
            graph.cache_bytes[found[parameter]] = rows * width * item_bytes
            graph.require(rows, width)
    return found


def _block(graph: ShapeGraph, layer: int, x: str) -> str:
    """Add the predictor, if its kernel makes a mask, and the block; return its name. A neuron's rows are adjacent."""
    outline, packing = graph.outline, graph.packing
    hidden, neurons, gated = outline.hidden, outline.neurons, outline.form.gated
    inputs = [x]
    if packing.makes_mask:
        inputs.append(graph.add(f"{layer}.mask", "predict", [x], neurons, _predictor(graph, layer)))
    matrices, tensors = 3 if gated else 2, {}
    if packing.predictor == "exact":
        # The gating matrix, which is up without a gate, is read in full and is a tensor of its own.
        tensors["decide_w"] = graph.matrix(f"{layer}.gating", neurons, hidden)
        matrices -= 1
    tensors["neuron_w"] = graph.matrix(f"{layer}.neurons", neurons * matrices, hidden)
    if outline.form.ffn_bias:
        widths = {"gate_bias": neurons, "up_bias": neurons, "down_bias": hidden}
        names = list(widths)[0 if gated else 1 :]
        tensors |= {name: graph.vector(f"{layer}.{name}", widths[name]) for name in names}
    return graph.add(f"{layer}.block", "ffn", inputs, hidden, tensors)


def _predictor(graph: ShapeGraph, layer: int) -> dict[str, str]:
    hidden, neurons, rank = graph.outline.hidden, graph.outline.neurons, graph.packing.rank
    if graph.packing.predictor == "sign":
        row_bytes = sign_row_bytes(hidden)
        graph.weight_bytes[f"{layer}.signs"] = neurons * row_bytes
        return {"signs": f"{layer}.signs", "most": graph.vector("most", 1, counts=False)}
    form = graph.packing.predictor_format
    return {
        "fc1": graph.matrix(f"{layer}.fc1", rank, hidden, form, counts=False),
        "fc2": graph.matrix(f"{layer}.fc2", neurons, rank, form, counts=False),
        "bias": graph.vector(f"{layer}.predictor_bias", neurons, counts=False),
        "threshold": graph.vector("threshold", 1, counts=False),
    }
