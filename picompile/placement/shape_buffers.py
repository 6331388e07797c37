"""The workspace of a model given by its numbers: activations, scratch memory of CPU kernels, and logits.

The functions of a program are those of `picompile_codegen.lowering.lower`; scratch memory is what the kernels of
`picompile_codegen.cpu` declare. `tests/placement/test_shapes.py` holds all of it to lowered graphs, to the byte.
"""

from collections.abc import Collection, Sequence

from picompile.placement.shape_graph import LEARNED, ShapeGraph, ShapeNode, sign_row_bytes
from picompile_codegen.lowering.arena import Lifetime, align, place_buffers
from picompile_passes.weight_formats import FORMATS, GROUP

_FLOAT_BYTES = 4
_INT_BYTES = 4
_STEP_BYTES = 8 * _INT_BYTES
# Two counters of 64 bits for each feed-forward block, and two that nobody reads.
_STATISTICS_BYTES = 16
# `cpu/ffn.py`: runs of neurons that a token's block is cut into.
_SLICES = 16
_CACHE_LINE_FLOATS = 16
# `cpu/add_rows.py`: columns whose sums lie together.
_SUM_COLUMNS = {"f16": 8, "q8": 32, "q4": 64}
# `cpu/quantized.py`: scales that are read at a time; also the floats of a vector.
_LANES = 8
# `cpu/attention_work.py`: where few heads have keys, tasks share the positions as well.
_ENOUGH_HEADS, _PART_POSITIONS, _MOST_PARTS = 16, 512, 32


def workspace_bytes(graph: ShapeGraph, sequences: int) -> int:
    """Return the bytes of the arena, and for each sequence more those of a token's activations and logits."""
    outline, chunk = graph.outline, graph.packing.chunk
    reserved = [_STEP_BYTES, *[chunk * _INT_BYTES] * 3, outline.layers * _STATISTICS_BYTES, _STATISTICS_BYTES]
    logits = outline.vocab * _FLOAT_BYTES
    base = sum(map(align, (*reserved, logits, chunk * logits)))
    functions = (_whole(graph, 1, masked=True), _prefill(graph), _prefill_last(graph), _whole(graph, chunk))
    arenas = [place_buffers(function.lifetimes(), base) for function in functions]
    decode, _ = arenas[0]
    of_token = align(max(offset + life.size for life, offset in decode.items())) - min(decode.values())
    return max(end for _, end in arenas) + (sequences - 1) * (of_token + align(logits))


class _Function:
    """The buffers of one function while it is lowered; `rows` is how many tokens a call takes."""

    def __init__(self, graph: ShapeGraph, rows: int) -> None:
        self.graph, self.rows = graph, rows
        self._widths = {node.name: node.width for node in graph.nodes}
        self._sizes: list[int] = []
        self._spans: dict[int, tuple[int, int]] = {}
        self._calls = 0
        self.values: dict[str, int] = {}

    def lifetimes(self) -> list[Lifetime]:
        """Return every buffer with its first and its last call. Ties are broken by names, as in lowering."""
        return [Lifetime(str(number), self._sizes[number], *span) for number, span in self._spans.items()]

    def lower(self, node: ShapeNode) -> None:
        """Append the calls of a node."""
        if node.op == "rotary" and self.rows == 1:
            return  # attention turns queries and keys itself
        if node.op == "attention" and self.rows > 1:
            self.extend_cache(node)
        # A chunk's keys and values are in the cache by then.
        inputs = node.inputs[:1] if node.op == "attention" and self.rows > 1 else node.inputs
        read = [self._value(name) for name in inputs if name in self.values or node.op == "attention"]
        written = [] if node.op == "head" else [self._new_value(node.name, node.op)]
        self._call(read + written + [self._new(size) for size in self._scratch(node)])

    def extend_cache(self, attention: ShapeNode) -> None:
        """Append the two calls that write keys and values to the caches."""
        for name in attention.inputs[1:]:
            self._call([self._value(name)])

    def take_last(self, name: str) -> None:
        """Append the call that keeps the last row of a value; its new buffer is of the rows that there are then."""
        before = self.values[name]
        self._call([before, self._new_value(name, "take_last")])

    def _value(self, name: str) -> int:
        turned = next((node for node in self.graph.nodes if node.name == name and node.op == "rotary"), None)
        return self.values[turned.inputs[0] if turned is not None and name not in self.values else name]

    def _new_value(self, name: str, op: str) -> int:
        item_bytes = 1 if op == "predict" else _FLOAT_BYTES
        self.values[name] = self._new(self.rows * self._widths[name] * item_bytes)
        return self.values[name]

    def _new(self, size: int) -> int:
        self._sizes.append(size)
        return len(self._sizes) - 1

    def _call(self, buffers: Sequence[int]) -> None:
        for buffer in buffers:
            first, _ = self._spans.get(buffer, (self._calls, 0))
            self._spans[buffer] = first, self._calls
        self._calls += 1

    def _scratch(self, node: ShapeNode) -> list[int]:
        """Return the bytes of each scratch buffer that a node's kernel asks for, in the kernel's order."""
        if node.op in ("linear", "head"):
            return [] if self.rows == 1 else _quantized_rows(self.graph, self.rows, self._widths[node.inputs[0]])
        if node.op == "attention":
            return _attention_scratch(self.graph) if self.rows == 1 else []
        if node.op == "predict":
            return _predictor_scratch(self.graph)
        if node.op == "ffn":
            is_masked = len(node.inputs) > 1 and node.inputs[1] in self.values
            return _token_block(self.graph, is_masked) if self.rows == 1 else _chunk_block(self.graph, self.rows)
        return []


def _whole(graph: ShapeGraph, rows: int, *, masked: bool = False) -> _Function:
    function = _Function(graph, rows)
    for node in graph.nodes:
        if masked or node.op != "predict":
            function.lower(node)
    return function


def _prefill(graph: ShapeGraph) -> _Function:
    """Return all that the last layer's keys and values depend on."""
    function, last = _Function(graph, graph.packing.chunk), graph.attentions()[-1]
    needed = _ancestors(graph, last.inputs[1:])
    for node in graph.nodes[: graph.nodes.index(last)]:
        if node.name in needed:
            function.lower(node)
    function.extend_cache(last)
    return function


def _prefill_last(graph: ShapeGraph) -> _Function:
    """Return a chunk up to the last attention, and its last token from there on."""
    function = _Function(graph, graph.packing.chunk)
    nodes = [node for node in graph.nodes if node.op != "predict"]
    behind = nodes.index(graph.attentions()[-1]) + 1
    head, tail = nodes[:behind], nodes[behind:]
    for node in head:
        function.lower(node)
    inside = {node.name for node in head}
    function.rows = 1
    for name in dict.fromkeys(name for node in tail for name in node.inputs if name in inside):
        function.take_last(name)
    for node in tail:
        function.lower(node)
    return function


def _ancestors(graph: ShapeGraph, names: Collection[str]) -> set[str]:
    """`names` and all that they depend on, but not by way of predictors."""
    by_name, found, waiting = {node.name: node for node in graph.nodes}, set[str](), list(names)
    while waiting:
        node = by_name[waiting.pop()]
        if node.name not in found and node.op != "predict":
            found.add(node.name)
            waiting.extend(node.inputs)
    return found


def _quantized_rows(graph: ShapeGraph, rows: int, columns: int) -> list[int]:
    """Return the sizes of a chunk's activations as bytes, their scales and offsets; none if weights have no scales."""
    if not FORMATS[graph.packing.quant].scale_bytes:
        return []
    groups = -(-columns // GROUP)
    padded = -(-groups // _LANES) * _LANES
    return [rows * groups * GROUP, rows * padded * _FLOAT_BYTES, rows * padded * _INT_BYTES]


def _attention_scratch(graph: ShapeGraph) -> list[int]:
    """Return the sizes of the outputs and extremes of the context's parts; none if there is one part."""
    outline, context = graph.outline, graph.packing.context
    positions = -(-context // (_MOST_PARTS * _PART_POSITIONS)) * _PART_POSITIONS
    parts = 1 if outline.kv_heads >= _ENOUGH_HEADS else -(-context // positions)
    if parts == 1:
        return []
    width = -(-outline.head_dim // _LANES) * _LANES
    return [outline.heads * parts * size * _FLOAT_BYTES for size in (width, 2)]


def _predictor_scratch(graph: ShapeGraph) -> list[int]:
    if graph.packing.predictor in LEARNED:
        return [graph.packing.rank * _FLOAT_BYTES]
    return [sign_row_bytes(graph.outline.hidden)]


def _token_block(graph: ShapeGraph, is_masked: bool) -> list[int]:
    """Return the sizes for one token: gating products, list of neurons, sums of the slices and their counts."""
    outline, columns = graph.outline, _SUM_COLUMNS[graph.packing.quant]
    is_exact = graph.packing.predictor == "exact"
    listed = [outline.neurons * _FLOAT_BYTES] * is_exact + [outline.neurons * _INT_BYTES] * (is_exact or is_masked)
    width = -(-outline.hidden // columns) * columns + _CACHE_LINE_FLOATS
    return [*listed, _SLICES * width * _FLOAT_BYTES, _SLICES * _INT_BYTES]


def _chunk_block(graph: ShapeGraph, rows: int) -> list[int]:
    """Return the sizes for a chunk: products with gate and up, and the inputs of both products as bytes."""
    outline = graph.outline
    products = [rows * outline.neurons * _FLOAT_BYTES] * (1 + outline.form.gated)
    x, hidden = (_quantized_rows(graph, rows, columns) for columns in (outline.hidden, outline.neurons))
    return [*products, *x, *hidden]
