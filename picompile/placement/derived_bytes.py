"""Scratch memory, launches and bytes of a model that is known by its numbers alone. Needs no torch and no compiler."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from picompile.choices import KV_DTYPES, MOST_SEQUENCES, default_kv_dtype
from picompile.placement.firing import Firing, estimate_rank
from picompile.placement.launches import TalliedCall
from picompile.placement.model_bytes import ModelBytes, Packing
from picompile.placement.shape_graph import (
    ITEM_BYTES,
    LEARNED,
    ShapeGraph,
    ShapeNode,
    ShapePacking,
    shape_graph,
    sign_row_bytes,
)
from picompile.placement.shape_outline import ModelOutline
from picompile.placement.tally import TalliedBlock, TalliedProgram, tally
from picompile_codegen.lowering.arena import Lifetime, align, place_buffers
from picompile_passes.formats import FORMATS, GROUP
from picompile_passes.silence import silences_neurons

# The workspace of a model given by its numbers: activations, scratch memory of CPU kernels, and logits.
#
# The functions of a program are those of `picompile_codegen.lowering.lower`; scratch memory is what the kernels of
# `picompile_codegen.cpu` declare. `tests/placement/test_shapes.py` holds all of it to lowered graphs, to the byte.


_FLOAT_BYTES = 4
_INT_BYTES = 4
_STEP_BYTES = 8 * _INT_BYTES
# Two counters of 64 bits for each feed-forward block, and two that nobody reads.
_STATISTICS_BYTES = 16
# `cpu/ffn.py`: runs of neurons that a token's block is cut into.
_SLICES = 16
_CACHE_LINE_FLOATS = 16
# `cpu/quantized.py`: scales that are read at a time; also the floats of a vector.
_LANES = 8
# `cpu/panels.py`: tokens of a panel.
_PANEL_TOKENS = 8
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
            return [] if self.rows == 1 else _packed_rows(self.graph, self.rows, self._widths[node.inputs[0]])
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


def _packed_rows(graph: ShapeGraph, rows: int, columns: int) -> list[int]:
    """Return the sizes of a chunk's inputs as they are multiplied: panels, or bytes with their scales and offsets."""
    return _quantized_rows(graph, rows, columns) or _panels(rows, columns)


def _panels(rows: int, columns: int) -> list[int]:
    """Return the size of inputs as panels of float32 (`cpu/panels.py`): of eight tokens each, and whole groups."""
    return [-(-rows // _PANEL_TOKENS) * _PANEL_TOKENS * -(-columns // GROUP) * GROUP * _FLOAT_BYTES]


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


def _sum_columns(quant: str) -> int:
    """Return how many columns' sums lie together (`cpu/add_rows.py`): those of 32 bytes, or of a vector of floats."""
    form = FORMATS[quant]
    if not form.scale_bytes:
        return _LANES
    return GROUP if form.data_bits == 8 else 2 * GROUP


def _token_block(graph: ShapeGraph, is_masked: bool) -> list[int]:
    """Return the sizes for one token: gating products, list of neurons, sums of the slices and their counts."""
    outline, columns = graph.outline, _sum_columns(graph.packing.quant)
    is_exact = graph.packing.predictor == "exact"
    listed = [outline.neurons * _FLOAT_BYTES] * is_exact + [outline.neurons * _INT_BYTES] * (is_exact or is_masked)
    width = -(-outline.hidden // columns) * columns + _CACHE_LINE_FLOATS
    return [*listed, _SLICES * width * _FLOAT_BYTES, _SLICES * _INT_BYTES]


def _chunk_block(graph: ShapeGraph, rows: int) -> list[int]:
    """Return the sizes for a chunk: products with gate and up, and the inputs of both products as they are multiplied.

    Hidden values are in panels or bytes, as an instruction set has it, and there is memory for both.
    """
    outline = graph.outline
    products = [rows * outline.neurons * _FLOAT_BYTES] * (1 + outline.form.gated)
    x, hidden = _packed_rows(graph, rows, outline.hidden), _quantized_rows(graph, rows, outline.neurons)
    return [*products, *x, *_panels(rows, outline.neurons), *hidden]


# The launches follow the rules of `picompile_codegen.cuda`; `tests/placement/test_shapes.py` compares their number with
# the kernels there.

# `cuda/attention_decode.py`: registers for the queries of a block, of which there are eight at most.
# `cuda/attention_common.py`: elements of a query that a thread has at once.
_QUERY_REGISTERS, _MOST_QUERIES, _UNIT_ELEMENTS, _UNIT_BYTES, _WARP = 64, 8, 8, 16, 32
# `cuda/ffn_down.py`: tiles of a chunk's product with down, and slices of its neurons where tiles are few.
_SMALL_TILE, _LARGE_TILE, _TILE_DEPTH = 64, 128, 32
_ENOUGH_TILES, _FEWEST_NEURONS, _MOST_SLICES = 256, 256, 8


def launches_of(graph: ShapeGraph, node: ShapeNode, sequences: int) -> int:
    """Return the launches of a node's kernel where `sequences` are decoded together."""
    if node.op == "attention":
        return _attention_launches(graph.outline, graph.packing.kv_dtype)
    if node.op == "predict":
        return 2 if graph.packing.predictor in LEARNED else 1
    if node.op in ("linear", "head"):
        # Tensor cores take halves, to which a launch rounds what several sequences have.
        return 1 + (sequences > 1)
    if node.op != "ffn":
        return 1
    if sequences == 1 or graph.packing.makes_mask:
        # Groups of neurons, and the rows of down of those that fired.
        return 2
    # Halves, products with gate and up, halves of these, products with down.
    return 4 + _is_down_sliced(graph.outline, sequences)


def _attention_launches(outline: ModelOutline, kv_dtype: str) -> int:
    """Return 1, plus 1 if several blocks wait for the new key."""
    group = outline.heads // outline.kv_heads
    most = max(1, min(_MOST_QUERIES, group, _QUERY_REGISTERS // _query_registers(outline.head_dim, kv_dtype)))
    queries = _ceil_div(group, _ceil_div(group, most))
    return 1 + (group > queries)


def _query_registers(head_dim: int, kv_dtype: str) -> int:
    """Return the registers that a thread needs for its share of a query."""
    size, item_bytes = 1, ITEM_BYTES[kv_dtype]
    while not head_dim % (2 * size) and 2 * size <= min(_UNIT_ELEMENTS, _UNIT_BYTES // item_bytes):
        size *= 2
    units = head_dim // size
    return _ceil_div(units, min(_WARP, 1 << (units - 1).bit_length())) * size


def _is_down_sliced(outline: ModelOutline, rows: int) -> bool:
    """Return whether a chunk's product with down is cut into slices of neurons, which one more launch adds up."""
    side = _LARGE_TILE if rows > _SMALL_TILE else _SMALL_TILE
    tiles = _ceil_div(rows, side) * _ceil_div(outline.hidden, side)
    wanted = min(_ceil_div(_ENOUGH_TILES, tiles), _ceil_div(outline.neurons, _FEWEST_NEURONS), _MOST_SLICES)
    of_slice = _ceil_div(_ceil_div(outline.neurons, wanted), _TILE_DEPTH) * _TILE_DEPTH
    return outline.neurons > of_slice


def _ceil_div(count: int, size: int) -> int:
    return -(-count // size)


# Bytes and launches together: `tests/placement/test_shapes.py` compares them with those of the captured and lowered
# graph, to the byte and launch.

# The kinds whose tensors and kernels are modelled here; those of plug-ins are lowered.
DERIVED_PREDICTORS = ("exact", "none", *LEARNED, "sign")

# The top logits are searched in slices of the vocabulary, then among the results of these.
_TOP_LOGITS_LAUNCHES = 2


def derive_bytes(name: str, outline: ModelOutline, packing: Packing, firing: Firing | None = None) -> ModelBytes | None:
    """Return the bytes and launches of a model; None if the model must be lowered to know them.

    That is so for a plug-in's predictor, for `exact` with an activation that silences no neuron, and for a tensor with
    more elements than kernels can count.
    """
    sparse = silences_neurons(outline.activation)
    predictor = packing.predictor
    if predictor == "auto":
        predictor = "exact" if sparse else "none"
    if predictor not in DERIVED_PREDICTORS or (predictor == "exact" and not sparse):
        return None
    kv_dtype = packing.kv_dtype or default_kv_dtype(outline.activation)
    shape_packing = ShapePacking(
        packing.quant, predictor, 1, packing.context, KV_DTYPES[kv_dtype], packing.chunk, packing.predictor_quant
    )
    # Layers behind the second are like it.
    kept = min(outline.layers, 2)
    graph = shape_graph(outline, shape_packing, kept)
    parameters = graph.parameter_count()
    if predictor in LEARNED:
        rank = estimate_rank(outline.hidden, outline.neurons, parameters / outline.layers, firing)
        graph = shape_graph(outline, replace(shape_packing, rank=rank), kept)
    if not graph.has_kernels:
        return None
    counted = tally(_tallied(graph, packing.batch), packing, name, outline.hidden, parameters)
    return replace(counted, layers=counted.layers + counted.layers[1:] * (outline.layers - kept))


def _tallied(graph: ShapeGraph, sequences: int) -> TalliedProgram:
    sequences_of_step = min(sequences, MOST_SEQUENCES)
    predictor, neurons = graph.packing.predictor, graph.outline.neurons
    block = TalliedBlock(neurons, predictor, row_local=predictor not in LEARNED)
    return TalliedProgram(
        calls=tuple(
            TalliedCall(
                node.op, node.tensors, launches_of(graph, node, sequences_of_step), node.inputs, node.name, node.width
            )
            for node in graph.nodes
            # When a token is decoded, the attention kernel rotates queries and keys itself.
            if node.op != "rotary"
        ),
        weight_bytes=graph.weight_bytes,
        cache_bytes=graph.cache_bytes,
        blocks=(block,) * len(graph.attentions()),
        workspace_bytes=workspace_bytes(graph, sequences),
        top_logits_launches=_TOP_LOGITS_LAUNCHES,
    )
