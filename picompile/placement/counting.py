"""Count a model's bytes on the packed tensors, caches and buffers that compiling it would make.

The graph is lowered as for an artifact, but no weight is read and no kernel is compiled. `tally` then finds the part of
the model that each tensor belongs to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from picompile.choices import KV_DTYPES, MOST_LAYERS, MOST_SEQUENCES, default_kv_dtype
from picompile.errors import UnsupportedModelError, UsageError
from picompile.placement.derived_bytes import derive_bytes
from picompile.placement.firing import Firing
from picompile.placement.launches import TalliedCall
from picompile.placement.model_bytes import ModelBytes, Packing, predicting_early
from picompile.placement.shape_outline import outline_of_config
from picompile.placement.tally import TalliedBlock, TalliedProgram, tally
from picompile_codegen.lowering.arena import align

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from picompile.predictors.store import Predictors
    from picompile_codegen.cpu.kernel import WrittenKernel
    from picompile_codegen.lowering.lower import Lowered
    from picompile_codegen.lowering.program import LoweredProgram, ProgramCall
    from picompile_codegen.specs import KernelSpec
    from picompile_passes.base import Pass

# A part of a split layer has at most three vectors of its own, one element a neuron: its neuron numbers and the biases
# of gate and up. Each is padded to 64 bytes.
SPLIT_BYTES = 3 * 64
# Parameters that say where the rows of a step are.
_PLACES = ("step", "tokens", "positions", "slots")


def count_bytes(
    name: str,
    graph_module: "GraphModule",
    packing: Packing,
    predictors: "Predictors | None" = None,
    firing: Firing | None = None,
) -> ModelBytes:
    """Return the bytes and launches of the captured model `graph_module`.

    `predictors`, if given, replace `packing.predictor`. Learned predictors that are not given have the rank that
    `estimate_rank` returns for `firing`. At batch 1 the sum of all bytes is that of the artifact's tensors, the KV
    cache and the arena. Each further sequence adds its cache, and a token's activations and logits.

    Raises:
        UnsupportedModelError: the model has no feed-forward block.
        UnsupportedGraphError: the model cannot be compiled in this way.
        UsageError: kernels cannot count the context.
    """
    model = _count(name, graph_module, packing, predictors, firing, 0)
    inputs = {} if predictors is None else predictors.insert_pass().inputs
    return predicting_early(model, [layer for layer, read in inputs.items() if read == "previous"])


def shape_bytes(name: str, config: Mapping[str, Any], packing: Packing, firing: Firing | None = None) -> ModelBytes:
    """Return the bytes and launches of the model that a config.json of these contents describes.

    They come from the numbers of the config alone where `shape_outline` knows its family and all of its fields, without
    torch, transformers or TVM. Other models are captured and lowered, as far as their first two layers: all layers but
    the first, behind the embedding, are alike.

    Raises as `count_bytes` does, `UnsupportedModelError` for a config that cannot be captured, and `UsageError` for a
    context that is longer than it allows.
    """
    layers = config.get("num_hidden_layers")
    if type(layers) is not int or not 0 < layers < MOST_LAYERS:
        raise UnsupportedModelError(
            f"{name}: num_hidden_layers must be a whole number above 0, and below {MOST_LAYERS}, not {layers!r}"
        )
    limit = config.get("max_position_embeddings")
    if isinstance(limit, int) and packing.context > limit:
        raise UsageError(f"a context of {packing.context} tokens is more than the model's {limit} positions")
    outline = outline_of_config(config)
    derived = None if outline is None else derive_bytes(name, outline, packing, firing)
    return derived or lowered_shape_bytes(name, config, packing, firing)


def lowered_shape_bytes(
    name: str, config: Mapping[str, Any], packing: Packing, firing: Firing | None = None
) -> ModelBytes:
    """Return what `shape_bytes` returns, from the captured and lowered graph of the first two layers."""
    from picompile.frontend.hf import capture_config

    layers = config["num_hidden_layers"]
    captured = capture_config(shortened(config, layers, min(layers, 2)))
    more = max(0, layers - 2)
    counted = _count(name, captured, packing, None, firing, more)
    # Of what is not in layers only the statistics grow with their number: two int64 each.
    statistics = align(16 * layers) - align(16 * len(counted.layers))
    return replace(
        counted,
        layers=counted.layers + counted.layers[1:] * more,
        workspace_bytes=counted.workspace_bytes + statistics,
    )


def shortened(config: Mapping[str, Any], layers: int, kept: int) -> dict[str, Any]:
    """Return the config of the first `kept` layers; lists with an entry for each layer (`layer_types`) are cut too."""
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
    """Count a graph. `more` layers like its second are not in it, but ranks are chosen by the parameters of all."""
    from picompile.predictors.store import block_shapes
    from picompile_codegen.errors import CodegenError
    from picompile_codegen.lowering.function import LowerOptions
    from picompile_codegen.lowering.lower import lower
    from picompile_passes.passes.canonicalize import canonicalize
    from picompile_passes.passes.quantize import Quantize
    from picompile_passes.pipeline import Pipeline

    parameters = _parameters(graph_module, more)
    canonical = canonicalize(graph_module)
    blocks = block_shapes(canonical)
    if not blocks:
        raise UnsupportedModelError(f"{name}: the model has no feed-forward block whose neurons could be placed")
    if predictors is None:
        insert = _insert_pass(blocks, packing.predictor, parameters, len(blocks) + more, firing)
    else:
        insert = predictors.insert_pass()
    quantized = Pipeline((insert, Quantize(packing.quant, packing.predictor_quant, tensors=packing.tensors)))(
        canonical
    ).graph_module
    kv_dtype = KV_DTYPES[packing.kv_dtype or _kv_dtype(canonical)]
    try:
        lowered = lower(quantized, LowerOptions(packing.context, packing.chunk, kv_dtype))
    except CodegenError as error:
        raise UsageError(
            f"{name}: no kernels can be made for a context of {packing.context} tokens: {error}"
        ) from error
    first = next(iter(blocks.values()))
    return tally(tallied_program(lowered, packing.batch), packing, name, first.hidden, parameters)


def tallied_program(lowered: "Lowered", batch: int) -> TalliedProgram:
    """Return the program to tally of a graph lowered for the host alone, decoding `batch` sequences together."""
    from picompile_codegen.lowering.program import tensor_bytes
    from picompile_passes.predictors import predictor_kind

    program, calls = lowered.program, lowered.program.functions["decode"]
    kernels = {kernel.name: kernel for kernel in lowered.kernels}
    launches = _launches_by_kernel(lowered, calls, batch)
    return TalliedProgram(
        calls=tuple(_tallied_call(call, kernels[call.kernel], launches[call.kernel]) for call in calls),
        weight_bytes={name: tensor_bytes(each.dtype, each.shape) for name, each in lowered.weights.tensors.items()},
        cache_bytes={name: tensor_bytes(each.dtype, each.shape) for name, each in program.state.items()},
        blocks=tuple(
            TalliedBlock(part.neurons, part.predictor, predictor_kind(part.predictor).row_local) for part in program.ffn
        ),
        workspace_bytes=_workspace_bytes(program, batch),
        top_logits_launches=_top_logits_launches(program.vocab, batch),
    )


def _tallied_call(call: "ProgramCall", kernel: "WrittenKernel", launches: int) -> TalliedCall:
    tensors, reads, made = dict[str, str](), list[str](), None
    for parameter, argument in zip(kernel.arguments, call.args, strict=True):
        if argument.space != "buffer":
            tensors.setdefault(parameter.name.partition(".")[0], argument.name)
        elif parameter.access == "in" and parameter.name not in _PLACES:
            reads.append(argument.name)
        elif parameter.access == "out" and made is None:
            made = argument.name, parameter.shape[-1]
    name, width = made or ("", 0)
    return TalliedCall(call.op, tensors, launches, tuple(reads), name, width)


def _launches_by_kernel(lowered: "Lowered", calls: "Sequence[ProgramCall]", batch: int) -> dict[str, int]:
    """Return the launches of each kernel in `calls`, by its name, counted on its CUDA kernel without compiling it."""
    specs = {kernel.name: spec for spec, kernel in lowered.built.items()}
    return {call.kernel: _launches_of(specs[call.kernel], batch) for call in calls}


def _launches_of(spec: "KernelSpec", batch: int) -> int:
    """Return the launches of the CUDA kernel of `spec` in a step of `batch` sequences.

    A plug-in's predictor without a CUDA kernel, which cannot be compiled for a GPU, counts as 1.
    """
    from picompile_codegen.registry import BACK_ENDS
    from picompile_passes.errors import UnsupportedGraphError

    # A plan may have more sequences than an artifact can hold.
    batch = min(batch, MOST_SEQUENCES)
    if batch > 1:
        # The function for several sequences asks for these values instead.
        changed: dict[str, Any] = {"rows": batch, "sequences": batch, "mode": "sequences", "rowwise": True}
        names = {field.name for field in fields(spec)}
        spec = replace(spec, **{name: value for name, value in changed.items() if name in names})
    try:
        return len(BACK_ENDS["cuda"].kernel(spec).grids)
    except UnsupportedGraphError:
        return 1


def _top_logits_launches(vocab: int, batch: int) -> int:
    from picompile_codegen.specs import TopLogitsSpec

    return _launches_of(TopLogitsSpec(vocab, rows=1), batch)


def _workspace_bytes(program: "LoweredProgram", batch: int) -> int:
    """Return the bytes of the arena, and for each further sequence those of a token's activations and logits."""
    from picompile_codegen.lowering.program import tensor_bytes

    spans = [
        (buffer.offset or 0, (buffer.offset or 0) + tensor_bytes(buffer.dtype, buffer.shape))
        for name, buffer in program.buffers.items()
        if name.startswith("decode.")
    ]
    of_token = align(max(end for _, end in spans)) - min(start for start, _ in spans)
    return program.arena_bytes + (batch - 1) * (of_token + align(4 * program.vocab))


def _parameters(graph_module: "GraphModule", more: int) -> int:
    """Return the parameters of the model, with `more` layers like its second."""
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
