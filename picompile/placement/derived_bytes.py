"""Bytes and launches of a model that is known by its numbers alone: a plan of it needs no torch and no compiler.

`tests/placement/test_shapes.py` holds the result to that of the captured and lowered graph, to the byte and launch.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from picompile.choices import KV_DTYPES, MOST_SEQUENCES
from picompile.placement.firing import Firing, estimate_rank
from picompile.placement.model_bytes import ModelBytes
from picompile.placement.shape_buffers import workspace_bytes
from picompile.placement.shape_graph import LEARNED, ShapeGraph, ShapePacking, shape_graph
from picompile.placement.shape_launches import launches_of
from picompile.placement.shape_outline import ModelOutline
from picompile.placement.tally import TalliedBlock, TalliedCall, TalliedProgram, tally
from picompile_passes.silence import silences_neurons

if TYPE_CHECKING:
    from picompile.placement.packing import Packing

# The kinds whose tensors and kernels are modelled here; those of plug-ins are lowered.
DERIVED_PREDICTORS = ("exact", "none", *LEARNED, "sign")

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
            TalliedCall(node.op, node.tensors, launches_of(graph, node, sequences_of_step))
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
