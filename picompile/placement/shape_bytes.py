"""Bytes and launches of a model that is known by its numbers alone: a plan of it needs no torch and no compiler.

`tests/placement/test_shapes.py` holds the result to that of the captured and lowered graph, to the byte and launch.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from picompile.compile_options import KV_DTYPES, MOST_SEQUENCES
from picompile.placement.firing import Firing, estimate_rank
from picompile.placement.model_bytes import ModelBytes
from picompile.placement.shape_buffers import workspace_bytes
from picompile.placement.shape_graph import LEARNED, ShapeGraph, ShapeNode, ShapePacking, shape_graph
from picompile.placement.shape_outline import ModelOutline
from picompile.placement.tally import TalliedBlock, TalliedCall, TalliedProgram, tally
from picompile_passes.silence import silences_neurons

if TYPE_CHECKING:
    from picompile.placement.counting import Packing

# The kinds whose tensors and kernels are modelled here; those of plug-ins are lowered.
DERIVED_PREDICTORS = ("exact", "none", *LEARNED, "sign")

# `cuda/attention_decode.py`: positions of a part of the context, a tile each, or several in long contexts.
_ATTENTION_TILE, _MOST_ATTENTION_PARTS = 256, 64
# `cuda/ffn_down.py`: tiles of a chunk's product with down, and slices of its neurons where tiles are few.
_TILE_SIDE, _TILE_DEPTH = 64, 32
_ENOUGH_TILES, _FEWEST_NEURONS, _MOST_SLICES = 256, 256, 8
# The search for the highest logits: in slices of the vocabulary, then among what these have found.
_TOP_LOGITS_LAUNCHES = 2


def derive_bytes(
    name: str, outline: ModelOutline, packing: "Packing", firing: Firing | None = None
) -> ModelBytes | None:
    """Return the bytes and launches of a model; None for what only lowering can judge.

    That is a predictor of a plug-in, `exact` with an activation that silences no neuron, and a tensor of more elements
    than kernels can count.
    """
    sparse = silences_neurons(outline.activation)
    predictor = packing.predictor
    if predictor == "auto":
        predictor = "exact" if sparse else "none"
    if predictor not in DERIVED_PREDICTORS or (predictor == "exact" and not sparse):
        return None
    kv_dtype = packing.kv_dtype or ("f32" if outline.activation.startswith("fatrelu") else "f16")
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
            TalliedCall(node.op, node.tensors, _launches(graph, node, sequences_of_step))
            for node in graph.nodes
            # A token's attention turns queries and keys itself.
            if node.op != "rotary"
        ),
        weight_bytes=graph.weight_bytes,
        cache_bytes=graph.cache_bytes,
        blocks=(block,) * len(graph.attentions()),
        workspace_bytes=workspace_bytes(graph, sequences),
        top_logits_launches=_TOP_LOGITS_LAUNCHES,
    )


def _launches(graph: ShapeGraph, node: ShapeNode, sequences: int) -> int:
    """How many launches the CUDA kernel of a node is, where `sequences` are decoded together."""
    if node.op == "attention":
        # The parts of a long context are merged by a launch more.
        return 1 if graph.packing.context <= _part_positions(graph.packing.context) else 2
    if node.op == "predict":
        return 2 if graph.packing.predictor in LEARNED else 1
    if node.op != "ffn":
        return 1
    if sequences == 1 or graph.packing.makes_mask:
        # Groups of neurons, the rows of down of those that fired, and the sum of the slices.
        return 3
    return 2 + graph.outline.form.gated + _down_is_sliced(graph.outline, sequences)


def _part_positions(context: int) -> int:
    return _ATTENTION_TILE * -(-context // (_ATTENTION_TILE * _MOST_ATTENTION_PARTS))


def _down_is_sliced(outline: ModelOutline, rows: int) -> bool:
    """Whether the product of several tokens with down is cut into slices of neurons, which a launch adds up."""
    tiles = -(-rows // _TILE_SIDE) * -(-outline.hidden // _TILE_SIDE)
    wanted = min(-(-_ENOUGH_TILES // tiles), -(-outline.neurons // _FEWEST_NEURONS), _MOST_SLICES)
    of_slice = -(-outline.neurons // wanted)
    each = -(-of_slice // _TILE_DEPTH) * _TILE_DEPTH
    return -(-outline.neurons // each) > 1
