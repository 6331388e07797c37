"""Count a model's bytes and launches on the tensors and calls that compiling it would make.

The graph is lowered twice, without reading a weight or compiling a kernel: for the host, whose tensors and buffers have
the bytes, and for an accelerator that computes everything, whose calls have the launches. A tensor belongs to the first
call of a decoded token that reads it; a call belongs to the layer and the part that its node is marked with.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch.fx import GraphModule, Node

from picompile.choices import KV_DTYPES, MOST_LAYERS, base_format, default_kv_dtype
from picompile.errors import UnsupportedModelError, UsageError
from picompile.frontend.facts import names_experts
from picompile.placement.firing import Firing, estimate_rank
from picompile.placement.model_bytes import LayerBytes, LayerLaunches, ModelBytes, Packing, predicting_early
from picompile.predictors.profile.collect import check_experts_fire
from picompile.predictors.store import BlockShape, Predictors, block_shapes
from picompile.synth.graph import shape_graph
from picompile.synth.shapes import plain_shape
from picompile_codegen.errors import CodegenError
from picompile_codegen.lowering.arena import align
from picompile_codegen.lowering.function import HOST, LowerOptions
from picompile_codegen.lowering.lower import Lowered, lower
from picompile_codegen.lowering.placement import Placement
from picompile_codegen.lowering.program import FfnPart, LoweredProgram, ProgramCall, tensor_bytes
from picompile_codegen.registry import BACK_ENDS
from picompile_codegen.specs import CopyWordsSpec, KernelArgument, ReceiveSpec, RmsNormSpec, SendSpec
from picompile_codegen.specs.arguments import ITEM_BYTES
from picompile_passes.base import Effect, Pass
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.graph.layers import operator_part
from picompile_passes.graph.nodes import arguments, calls, is_call
from picompile_passes.graph.operands import ADD, FFN, LAYER_NORM, RMS_NORM, SPARSE_FFN, expert_count
from picompile_passes.passes.canonicalize import canonicalize
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Pipeline
from picompile_passes.predictors import predictor_kind
from picompile_runtime.artifact import MOST_SEQUENCES

# choose(predicted graph) → formats of single matrices, by the names of their parameters
ChooseFormats = Callable[[GraphModule], Mapping[str, str]]

# The field of `LayerLaunches` that calls of operators of this part count into; others count as `attention`.
_COUNTED_AS = {"mask": "predictor", "block": "hot", "mixer": "kv_cache", "position": "kv_cache"}
# What brings the step's inputs and the embedding is in the time of the first transfer.
_TRANSFERS = (CopyWordsSpec.op, ReceiveSpec.op, SendSpec.op)


def count_bytes(
    name: str,
    graph_module: GraphModule,
    packing: Packing,
    predictors: Predictors | None = None,
    firing: Firing | None = None,
    choose: ChooseFormats | None = None,
) -> ModelBytes:
    """Return the bytes and launches of the captured model `graph_module`.

    `choose`, if given, returns what is taken for `packing.tensors`. `predictors`, if given, replace
    `packing.predictor`. Learned predictors that are not given have the rank that `estimate_rank` returns for `firing`.
    For one sequence, the sum of all bytes is that of the artifact's tensors, the KV cache and the arena. Each further
    sequence adds its cache, and a token's activations and logits.

    Raises:
        UnsupportedModelError: the model has no feed-forward block.
        UnsupportedGraphError: the model cannot be compiled in this way.
        UsageError: kernels cannot count the context.
    """
    insert = None if predictors is None else predictors.insert_pass()
    canonical = canonicalize(graph_module)
    model = graph_bytes(name, canonical, packing=packing, insert=insert, firing=firing, choose=choose)
    inputs = {} if insert is None else insert.inputs
    return predicting_early(model, [layer for layer, read in inputs.items() if read == "previous"])


def shape_bytes(name: str, config: Mapping[str, Any], packing: Packing, firing: Firing | None = None) -> ModelBytes:
    """Return the bytes and launches of the model that a config.json of these contents describes.

    They are counted on three of its layers. All but the first, behind the embedding, and the last, whose norm may
    belong to the head, are alike. All layers of a mixture are counted where some have no experts.

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
    kept = layers if _has_plain_layers(config) else min(layers, 3)
    canonical = config_graph(name, shortened(config, layers, kept))
    counted = graph_bytes(name, canonical, packing, insert=None, firing=firing, more=layers - kept)
    # Of what is not in layers only the statistics grow with their number: two int64 each.
    statistics = align(16 * layers) - align(16 * kept)
    return replace(
        counted,
        layers=counted.layers[:2] + counted.layers[1:2] * (layers - kept) + counted.layers[2:],
        workspace_bytes=counted.workspace_bytes + statistics,
    )


def _has_plain_layers(config: Mapping[str, Any]) -> bool:
    """Return whether a mixture of experts has layers without them, as far as its config.json says so."""
    regular = {"decoder_sparse_step": 1, "moe_layer_freq": 1, "interleave_moe_layer_step": 1}
    given = (config.get(key) for key in ("first_k_dense_replace", "num_dense_layers", "mlp_only_layers"))
    irregular = any(config.get(key, usual) != usual for key, usual in regular.items())
    return names_experts(config) and (irregular or any(given))


def config_graph(name: str, config: Mapping[str, Any]) -> GraphModule:
    """Return the canonical graph of a config.json: captured, which takes seconds, unless its shape says everything."""
    shape = plain_shape(name, config)
    if shape is not None:
        return shape_graph(shape)
    from picompile.frontend.hf import capture_config

    return canonicalize(capture_config(config))


def shortened(config: Mapping[str, Any], layers: int, kept: int) -> dict[str, Any]:
    """Return the config of the first `kept` layers.

    Lists with an entry for each layer (`layer_types`, `rope_layout`) are cut too.
    """
    values = {key: value[:kept] if _for_each(key, value, layers) else value for key, value in config.items()}
    return values | {"num_hidden_layers": kept}


def _for_each(key: str, value: object, layers: int) -> bool:
    is_of_layers = key.startswith("layer") or key.endswith("_layout")
    return isinstance(value, list) and len(value) == layers and is_of_layers


def graph_bytes(
    name: str,
    canonical: GraphModule,
    packing: Packing,
    insert: InsertPredictors | None = None,
    firing: Firing | None = None,
    more: int = 0,
    choose: ChooseFormats | None = None,
) -> ModelBytes:
    """Return the bytes and launches of a canonical graph, whose predictors are those of `insert`, if given.

    `more` layers like its second are not in it, but ranks are chosen by the parameters of all. `choose` as in
    `count_bytes`, and raises as it does.
    """
    blocks, parameters = block_shapes(canonical), _parameters(canonical, more)
    if not blocks:
        raise UnsupportedModelError(f"{name}: the model has no feed-forward block whose neurons could be placed")
    insert = insert or _insert_pass(blocks, packing.predictor, parameters, layers=len(blocks) + more, firing=firing)
    if insert.effect is Effect.SKIPS:
        check_experts_fire(name, calls(canonical.graph, FFN))
    # Experts are for CPUs, where no block has parts.
    has_experts = any(map(expert_count, calls(canonical.graph, FFN)))
    parted = () if has_experts else (Partition({layer: range(block.neurons) for layer, block in blocks.items()}),)
    quantized = _quantized(canonical, (insert, *parted), packing, choose)
    on_host, (launches, head_launches) = _lowered(name, quantized, packing, canonical)
    counted, parts = _Tensors(on_host), on_host.program.ffn
    return ModelBytes(
        name=name,
        quant=packing.quant,
        predictor="+".join(sorted({part.predictor for part in parts})),
        context=packing.context,
        sequences=packing.sequences,
        hidden=next(iter(blocks.values())).hidden,
        parameters=parameters,
        layers=tuple(
            counted.layer(part, blocks[part.layer].neurons, packing.sequences, launches[part.layer]) for part in parts
        ),
        embedding_bytes=counted.bytes_of("embedding"),
        head_bytes=counted.bytes_of("head"),
        tied=counted.tied,
        table_bytes=counted.bytes_of("table"),
        workspace_bytes=_workspace_bytes(on_host.program, packing.sequences),
        head_launches=head_launches,
        chunk=packing.chunk,
        predictor_quant=packing.predictor_quant,
    )


def _lowered(
    name: str, quantized: GraphModule, packing: Packing, canonical: GraphModule
) -> tuple[Lowered, tuple[Mapping[int, LayerLaunches], int]]:
    """Return the program of the host, and the launches that `_launches` returns. Raises where no kernel can be made."""
    # Weights of an accelerator lie in rows, where they can, and those beside them.
    options = LowerOptions(
        packing.context, packing.chunk, KV_DTYPES[packing.kv_dtype or _kv_dtype(canonical)], panels=False
    )
    try:
        return lower(quantized, options), _launches(quantized, options, min(packing.sequences, MOST_SEQUENCES))
    except CodegenError as error:
        raise UsageError(
            f"{name}: no kernels can be made for a context of {packing.context} tokens: {error}"
        ) from error


def _quantized(
    canonical: GraphModule, passes: tuple[Pass, ...], packing: Packing, choose: ChooseFormats | None
) -> GraphModule:
    """Return a canonical graph after `passes`, with its matrices in the formats of `packing`."""
    partitioned = Pipeline(passes)(canonical).graph_module
    tensors = packing.tensors if choose is None else choose(partitioned)
    formats = (base_format(packing.quant), packing.predictor_quant)
    quantize = Quantize(*formats, tensors=tensors, hot_by_outputs=packing.hot_by_outputs)
    return quantize(partitioned).graph_module


class _Tensor(NamedTuple):
    """A packed weight or state, and the part of the operator that reads it first.

    `owner` is a layer, `embedding`, `head` or `table`. `of_neurons` is the size of the rows that it has for neurons,
    and `gates` whether those of all neurons are read.
    """

    size: int
    part: str = ""
    owner: int | str = "table"
    of_neurons: int = 0
    gates: bool = False


class _Tensors:
    """The tensors of a lowered program, with the parts of the model that they belong to."""

    def __init__(self, lowered: Lowered) -> None:
        program, specs = lowered.program, {kernel.name: spec for spec, kernel in lowered.built.items()}
        readers: dict[str, tuple[ProgramCall, KernelArgument]] = {}
        for call in program.functions["decode"]:
            for argument, given in zip(lowered.built[specs[call.kernel]].arguments, call.args, strict=True):
                if given.space != "buffer":
                    readers.setdefault(given.name, (call, argument))
        head = {arg.name for call in program.functions["decode"] if _owner(call) == "head" for arg in call.args}
        self.tied = any(_owner(call) == "embedding" and name in head for name, (call, _) in readers.items())
        shared = {name for name, tensor in lowered.weights.tensors.items() if tensor.shared}
        self._all = []
        for name, tensor in (lowered.weights.tensors | program.state).items():
            size = tensor_bytes(tensor.dtype, tensor.shape)
            if name not in readers or name in shared:
                self._all.append(_Tensor(size))
                continue
            call, argument = readers[name]
            part, owner = "state" if name in program.state else _part(call), "head" if name in head else _owner(call)
            gates = specs[call.kernel].neuron_arguments.get(argument.name.partition(".")[0])
            of_neurons = 0 if gates is None else tensor_bytes(argument.dtype, argument.shape)
            self._all.append(_Tensor(size, part, owner, of_neurons, gates=bool(gates)))

    def bytes_of(self, owner: str) -> int:
        return sum(tensor.size for tensor in self._all if tensor.owner == owner)

    def layer(self, part: FfnPart, neurons: int, sequences: int, launches: LayerLaunches) -> LayerBytes:
        """Return the bytes of the layer whose block is `part`, with so many neurons in all experts."""
        mine = [tensor for tensor in self._all if tensor.owner == part.layer]
        of_block = [each for each in mine if each.part == "block" or each.of_neurons]
        caches = [each for each in mine if each.part == "state"]
        of_predictor = [each for each in mine if each.part == "mask" and not each.of_neurons]
        neuron_bytes = sum(each.of_neurons for each in mine) // neurons
        apart = sum(each.size for each in (*of_block, *of_predictor, *caches))
        return LayerBytes(
            attention_bytes=sum(each.size for each in mine) - apart,
            predictor_bytes=sum(each.size for each in of_predictor),
            neurons=neurons,
            neuron_bytes=neuron_bytes,
            gating_bytes=sum(each.of_neurons for each in mine if each.gates) // neurons,
            shared_bytes=sum(each.size for each in of_block) - neurons * neuron_bytes,
            kv_cache_bytes=sequences * sum(each.size for each in caches),
            launches=launches,
            number_bytes=0 if predictor_kind(part.predictor).row_local else ITEM_BYTES["int32"],
            experts=part.experts,
            chosen=part.chosen,
        )


def _owner(call: ProgramCall) -> int | str:
    """Return the layer that a tensor belongs to which `call` reads first, or what it belongs to outside of layers."""
    if _part(call) == "embedding":
        return "embedding"
    if _mark(call, "part") == "head":
        return "head" if _part(call) == "linear" else "table"
    return int(_mark(call, "layer") or 0)


def _part(call: ProgramCall) -> str:
    """Return the part in a layer of the operator that a call computes, such as `mixer`; nothing for a transfer."""
    return (operator_part(call.node) or "") if call.node is not None else ""


def _mark(call: ProgramCall, key: str) -> Any:
    return None if call.node is None else call.node.meta.get(key)


def _launches(
    graph_module: GraphModule, options: LowerOptions, sequences: int
) -> tuple[Mapping[int, LayerLaunches], int]:
    """Return the launches of a step of so many sequences on an accelerator that computes everything: by layer, and
    those of the output head.

    A norm at the beginning of a layer is computed with the last addition of the layer before. Not counted are:

    1. that it is a launch of its own in the first layer, and in one behind a layer of the host;
    2. the further inputs of a step of several sequences;
    3. that the hot part of such a step, if no mask is made, may add up fewer slices than the whole block.

    A mixture of experts, which no accelerator computes, has none.
    """
    blocks = list(calls(graph_module.graph, SPARSE_FFN))
    if any(map(expert_count, blocks)):
        return {block.meta["layer"]: LayerLaunches(0, 0, 0, 0) for block in blocks}, 0
    lowered = _on_accelerator(graph_module, options, sequences, len(blocks))
    kernels = {kernel.name: kernel for kernel in lowered.accelerator_built.values()}
    counts = {owner: Counter[str]() for owner in ("head", *(block.meta["layer"] for block in blocks))}
    launched = lowered.program.functions["decode" if sequences == 1 else "batch"]
    on_accelerator = [call for call in launched if call.device == "accelerator"]
    first = next(filter(_begins, on_accelerator), None)
    for call in on_accelerator:
        if call.op not in _TRANSFERS and call is not first:
            owner = "head" if _mark(call, "part") == "head" else int(_mark(call, "layer") or 0)
            counts[owner][_COUNTED_AS.get(_part(call), "attention")] += kernels[call.kernel].launches
    of_layers = {
        block.meta["layer"]: LayerLaunches(
            **{part: counts[block.meta["layer"]][part] for part in ("attention", "kv_cache", "predictor", "hot")},
            receive=_receives_alone(block),
        )
        for block in blocks
    }
    return of_layers, counts["head"].total()


def _on_accelerator(graph_module: GraphModule, options: LowerOptions, sequences: int, layers: int) -> Lowered:
    """Return the graph as a GPU computes it all; where that has no kernel, as a partition of the CPU does."""
    gpu = next(name for name in BACK_ENDS.builtin if BACK_ENDS[name].is_gpu)
    on_gpu = replace(
        options, sequences=sequences, accelerator=gpu, placement=Placement.all_of(layers), only_decoding=True
    )
    try:
        return lower(graph_module, on_gpu)
    except UnsupportedGraphError:
        return lower(graph_module, replace(on_gpu, accelerator=HOST))


def _begins(call: ProgramCall) -> bool:
    """Return whether a call is the norm of what comes from the embedding."""
    node = call.node
    return node is not None and call.op == RmsNormSpec.op and arguments(node)["x"].meta.get("part") == "embedding"


def _receives_alone(block: Node) -> tuple[int, int]:
    """Return the launches that receive the host's part of a layer's block: where it is the whole block, and else.

    An addition behind the block receives it. A norm does not; but it is computed with the addition of both parts.
    """
    if all(is_call(user, ADD) for user in block.users):
        return 0, 0
    return 1, int(not all(is_call(user, RMS_NORM, LAYER_NORM) for user in block.users))


def _workspace_bytes(program: LoweredProgram, sequences: int) -> int:
    """Return the bytes of the arena, and for each further sequence those of a token's activations and logits."""
    spans = [
        (buffer.offset or 0, (buffer.offset or 0) + tensor_bytes(buffer.dtype, buffer.shape))
        for name, buffer in program.buffers.items()
        if name.startswith("decode.")
    ]
    of_token = align(max(end for _, end in spans)) - min(start for start, _ in spans)
    return program.arena_bytes + (sequences - 1) * (of_token + align(4 * program.vocab))


def _parameters(canonical: GraphModule, more: int) -> int:
    """Return the parameters of the model, with `more` layers like its second."""
    # Parameters are on the meta device; other tensors are constants with values.
    tensors = dict(canonical.named_buffers()) | dict(canonical.named_parameters())
    sizes = {name: tensor.numel() for name, tensor in tensors.items() if tensor.is_meta}
    second = sum(size for name, size in sizes.items() if ".1." in name and name.replace(".1.", ".0.", 1) in sizes)
    return sum(sizes.values()) + more * second


def _insert_pass(
    blocks: Mapping[int, BlockShape], predictor: str, parameters: int, layers: int, firing: Firing | None
) -> InsertPredictors:
    if predictor == "auto" or not predictor_kind(predictor).has_rank:
        return InsertPredictors(predictor)
    ranks = {
        layer: estimate_rank(block.hidden, block.neurons, parameters / layers, firing)
        for layer, block in blocks.items()
    }
    return InsertPredictors(predictor, ranks=ranks)


def _kv_dtype(canonical: GraphModule) -> str:
    """Return the cache's type as the compiler chooses it; one block that needs f32 decides for the whole model."""
    wanted = {default_kv_dtype(arguments(block)["activation"]) for block in calls(canonical.graph, FFN)}
    return "f32" if "f32" in wanted else "f16"
