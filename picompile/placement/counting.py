"""What a model takes in memory, counted on the packed tensors, caches and buffers that compiling it would make.

The graph is lowered as for an artifact, with no weight read and no kernel compiled; `tally` then finds the place of
every tensor.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from picompile.choices import KV_DTYPES, MOST_LAYERS, default_kv_dtype
from picompile.errors import UnsupportedModelError, UsageError
from picompile.placement.firing import Firing
from picompile.placement.model_bytes import ModelBytes, Tally
from picompile.placement.packing import Packing

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from picompile.predictors import Predictors
    from picompile_passes.base import Pass

# A part of a split layer has at most three vectors of its own, one element a neuron: its neuron numbers and the biases
# of gate and up. Each is padded to 64 bytes.
SPLIT_BYTES = 3 * 64


def count_bytes(
    name: str,
    graph_module: "GraphModule",
    packing: Packing,
    predictors: "Predictors | None" = None,
    firing: Firing | None = None,
) -> ModelBytes:
    """Counts the model `graph_module` (as captured).

    `predictors` that are given take the place of `packing.predictor`. `learned` ones that are not get the rank that
    `estimate_rank` gives for `firing`. At batch 1 all bytes together are those of the artifact's tensors, of the KV
    cache and of the arena. Each sequence more adds its cache, and as much as one token's activations and logits take.

    Raises `UnsupportedModelError` for a model without a feed-forward block, `UnsupportedGraphError` for one that cannot
    be compiled in this way, `UsageError` for a context that kernels cannot count.
    """
    return _count(name, graph_module, packing, predictors, firing, 0)


def shape_bytes(name: str, config: Mapping[str, Any], packing: Packing, firing: Firing | None = None) -> ModelBytes:
    """Counts the model that a config.json of these contents describes, from its first two layers.

    All layers but the first, behind the embedding, are alike. Raises as `count_bytes` does, `UnsupportedModelError` for
    a config that cannot be captured, and `UsageError` for a context that is longer than it allows.
    """
    from picompile.frontend.hf import capture_config
    from picompile_codegen.lowering.function import align

    layers = config.get("num_hidden_layers")
    if type(layers) is not int or not 0 < layers < MOST_LAYERS:
        raise UnsupportedModelError(
            f"{name}: num_hidden_layers must be a whole number above 0, and below {MOST_LAYERS}, not {layers!r}"
        )
    limit = config.get("max_position_embeddings")
    if isinstance(limit, int) and packing.context > limit:
        raise UsageError(f"a context of {packing.context} tokens is more than the model's {limit} positions")
    captured = capture_config(_shortened(config, layers, min(layers, 2)))
    more = max(0, layers - 2)
    counted = _count(name, captured, packing, None, firing, more)
    # Of what is not in layers only the statistics grow with their number: two int64 each.
    statistics = align(16 * layers) - align(16 * len(counted.layers))
    return replace(
        counted,
        layers=counted.layers + counted.layers[1:] * more,
        workspace_bytes=counted.workspace_bytes + statistics,
    )


def _shortened(config: Mapping[str, Any], layers: int, kept: int) -> dict[str, Any]:
    """The config of the first `kept` layers; `layer_types` and its like say something of each layer."""
    values = {key: value[:kept] if _for_each(key, value, layers) else value for key, value in config.items()}
    return values | {"num_hidden_layers": kept}


def _for_each(key: str, value: object, layers: int) -> bool:
    return isinstance(value, list) and len(value) == layers and key.startswith("layer")


def _count(
    name: str,
    graph_module: "GraphModule",
    packing: Packing,
    predictors: "Predictors | None",
    firing: Firing | None,
    more: int,
) -> ModelBytes:
    """`more` layers like the second are not in the graph; ranks are chosen by the parameters of all."""
    from picompile.predictors.store import block_shapes
    from picompile_codegen.errors import CodegenError
    from picompile_codegen.lowering.function import LowerOptions
    from picompile_codegen.lowering.lower import lower
    from picompile_passes.passes.canonicalize import CANONICALIZE
    from picompile_passes.passes.quantize import Quantize
    from picompile_passes.pipeline import Pipeline

    parameters = _parameters(graph_module, more)
    canonical = Pipeline(tuple(CANONICALIZE))(graph_module).graph_module
    blocks = block_shapes(canonical)
    if not blocks:
        raise UnsupportedModelError(f"{name}: the model has no feed-forward block whose neurons could be placed")
    if predictors is None:
        insert = _insert_pass(blocks, packing.predictor, parameters, len(blocks) + more, firing)
    else:
        insert = predictors.insert_pass()
    quantized = Pipeline((insert, Quantize(packing.quant)))(canonical).graph_module
    kv_dtype = KV_DTYPES[packing.kv_dtype or _kv_dtype(canonical)]
    try:
        lowered = lower(quantized, LowerOptions(packing.context, packing.chunk, kv_dtype))
    except CodegenError as error:
        raise UsageError(
            f"{name}: no kernels can be made for a context of {packing.context} tokens: {error}"
        ) from error
    first = next(iter(blocks.values()))
    return Tally(lowered, packing).model(name, first.hidden, parameters)


def _parameters(graph_module: "GraphModule", more: int) -> int:
    """Parameters of the model; with `more` layers like the one with the number 1."""
    # Captured graphs have parameters on the meta device; other tensors are constants with values.
    sizes = {name: tensor.numel() for name, tensor in graph_module.named_buffers() if tensor.is_meta}
    second = sum(size for name, size in sizes.items() if ".1." in name and name.replace(".1.", ".0.", 1) in sizes)
    return sum(sizes.values()) + more * second


def _insert_pass(
    blocks: Mapping[int, Any], predictor: str, parameters: int, layers: int, firing: Firing | None
) -> "Pass":
    from picompile.placement.firing import estimate_rank
    from picompile_passes.passes.insert_predictors import InsertPredictors
    from picompile_passes.predictors import predictor_kind

    if predictor == "auto" or not predictor_kind(predictor).has_rank:
        return InsertPredictors(predictor)
    ranks = {
        layer: estimate_rank(block.hidden, block.neurons, parameters / layers, firing)
        for layer, block in blocks.items()
    }
    return InsertPredictors(predictor, ranks=ranks)


def _kv_dtype(canonical: "GraphModule") -> str:
    """Return the cache's type as the compiler chooses it; one block that needs f32 decides for the whole model."""
    from picompile_passes.graph.nodes import arguments, calls
    from picompile_passes.graph.operands import FFN

    wanted = {default_kv_dtype(arguments(block)["activation"]) for block in calls(canonical.graph, FFN)}
    return "f32" if "f32" in wanted else "f16"
