"""The bytes and launches of a model of which only the numbers in its config.json are known, without torch or TVM."""

from dataclasses import replace

from picompile.choices import KV_DTYPES, MOST_SEQUENCES, default_kv_dtype
from picompile.placement.firing import Firing, estimate_rank
from picompile.placement.model_bytes import ModelBytes, Packing
from picompile.placement.shape_buffers import workspace_bytes
from picompile.placement.shape_graph import ITEM_BYTES, LEARNED, ShapeGraph, ShapeNode, ShapePacking, shape_graph
from picompile.placement.shape_outline import ModelOutline
from picompile.placement.tally import TalliedBlock, TalliedCall, TalliedProgram, tally
from picompile_passes.silence import silences_neurons

# The number of launches follows the rules of `picompile_codegen.cuda`; `tests/placement/test_shapes.py` compares it
# with the kernels there.

# `cuda/attention_decode.py`: positions of a part of the context, a tile each, or several in long contexts; registers
# for the queries of a block, of which there are eight at most. `cuda/attention_common.py`: elements of a query that a
# thread has at once.
_ATTENTION_TILE, _MOST_PARTS = 256, 64
_QUERY_REGISTERS, _MOST_QUERIES, _UNIT_ELEMENTS, _UNIT_BYTES, _WARP = 64, 8, 8, 16, 32
# `cuda/ffn_down.py`: tiles of a chunk's product with down, and slices of its neurons where tiles are few.
_TILE_SIDE, _TILE_DEPTH = 64, 32
_ENOUGH_TILES, _FEWEST_NEURONS, _MOST_SLICES = 256, 256, 8


def launches_of(graph: ShapeGraph, node: ShapeNode, sequences: int) -> int:
    """Return the launches of a node's kernel where `sequences` are decoded together."""
    if node.op == "attention":
        return _attention_launches(graph.outline, graph.packing.context, graph.packing.kv_dtype)
    if node.op == "predict":
        return 2 if graph.packing.predictor in LEARNED else 1
    if node.op != "ffn":
        return 1
    if sequences == 1 or graph.packing.makes_mask:
        # Groups of neurons, the rows of down of those that fired, and the sum of the slices.
        return 3
    return 2 + graph.outline.form.gated + _is_down_sliced(graph.outline, sequences)


def _attention_launches(outline: ModelOutline, context: int, kv_dtype: str) -> int:
    """Return 1, plus 1 to merge the parts of a long context, plus 1 if several blocks wait for the new key."""
    part_positions = _ATTENTION_TILE * _ceil_div(context, _ATTENTION_TILE * _MOST_PARTS)
    group = outline.heads // outline.kv_heads
    most = max(1, min(_MOST_QUERIES, group, _QUERY_REGISTERS // _query_registers(outline.head_dim, kv_dtype)))
    queries = _ceil_div(group, _ceil_div(group, most))
    return 1 + (context > part_positions) + (group > queries)


def _query_registers(head_dim: int, kv_dtype: str) -> int:
    """Return the registers that a thread needs for its share of a query."""
    size, item_bytes = 1, ITEM_BYTES[kv_dtype]
    while not head_dim % (2 * size) and 2 * size <= min(_UNIT_ELEMENTS, _UNIT_BYTES // item_bytes):
        size *= 2
    units = head_dim // size
    return _ceil_div(units, min(_WARP, 1 << (units - 1).bit_length())) * size


def _is_down_sliced(outline: ModelOutline, rows: int) -> bool:
    """Return whether a chunk's product with down is cut into slices of neurons, which one more launch adds up."""
    tiles = _ceil_div(rows, _TILE_SIDE) * _ceil_div(outline.hidden, _TILE_SIDE)
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
    shape_packing = ShapePacking(packing.quant, predictor, 1, packing.context, KV_DTYPES[kv_dtype], packing.chunk)
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
            TalliedCall(node.op, node.tensors, launches_of(graph, node, sequences_of_step))
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
