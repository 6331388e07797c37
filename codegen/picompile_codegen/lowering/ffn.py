"""Predictors and feed-forward blocks as kernel calls.

Only `decode` and `batch` use masks. The functions that read prompts compute every neuron, because the tokens of a chunk
together need almost every one; `lower` gives these functions no predictors. Only `score_masked`, which tells what masks
cost, has some: it computes every neuron, and drops those that the masks leave out.

A package that offers a predictor kind offers its kernel, too: an entry point of the group `picompile.predictor_kernels`
has the kind's name and leads to an `operators.Lowering`. It appends calls to the function; the last call writes the
buffer that `mask_buffer` returned. `_low_rank` below is one. The specs of a package bring
their bodies (`KernelSpec.bodies`). The feed-forward block then computes the neurons that the mask names.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from picompile_codegen.lowering.counted import call_block
from picompile_codegen.lowering.function import DECODING, Bindings, Function, dimension
from picompile_codegen.lowering.operators import Lowering, lowers
from picompile_codegen.lowering.packing import PackedMatrix, is_whole_block
from picompile_codegen.lowering.program import Arg, FfnPart, tensor_bytes
from picompile_codegen.lowering.streaming import stream_block, streams
from picompile_codegen.signs import sign_row_bytes
from picompile_codegen.specs import ExpertsSpec, FfnSpec, PredictLowRankSpec, PredictSignsSpec, WholeFfnSpec
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.graph.nodes import arguments
from picompile_passes.graph.operands import NEURON_LIMITS, PREDICT, SPARSE_FFN, dequantized
from picompile_passes.plugins import Registry
from picompile_passes.predictors import predictor_kind, sign_limit


@lowers(PREDICT)
def lower_predict(node: Node, function: Function) -> None:
    """Append the calls that compute the mask of each row.

    `exact` and `none` need none; a plug-in's kind has a mask for one row only.

    Raises `UnsupportedGraphError` for a kind without a kernel, `RegistryError` for a package's that does not import.
    """
    if makes_mask(node, function.rows):
        kind = arguments(node)["kind"]
        if (lowering := PREDICTOR_LOWERINGS.get(kind)) is None:
            raise UnsupportedGraphError(f"{node.name}: there is no kernel for predictor kind {kind!r}")
        lowering(node, function)


def makes_mask(node: Node, rows: int) -> bool:
    """Return whether there is a kernel that predicts as `node` does for `rows` tokens."""
    kind = arguments(node)["kind"]
    # A plug-in's predictor kernel takes one token. With several tokens, every neuron is computed.
    return kind in PREDICTOR_LOWERINGS.builtin or (rows == 1 and not predictor_kind(kind).in_block)


def mask_buffer(node: Node, function: Function) -> Arg:
    """Return a new buffer uint8 [rows, neurons] for the mask that `node` predicts: 1 for a neuron to compute, 0 for
    others."""
    return function.result(node, "uint8")


def _low_rank(relu: bool) -> Lowering:
    def lower(node: Node, function: Function) -> None:
        values, weights = arguments(node), function.shared.weights
        fc1, fc2, bias = values["weights"]
        experts = _chosen_experts(values["gains"])
        run = int(fc2.meta["val"].shape[0]) // experts["experts"] if experts else 0
        first, second = weights.whole_matrices([fc1, fc2], run=run)
        spec = PredictLowRankSpec(
            formats=(first.format, second.format),
            neurons=second.rows,
            rank=first.rows,
            dim=dimension(values["x"]),
            relu=relu,
            rows=function.rows,
            panels=first.panels,
            **experts,
        )
        bindings: Bindings = _gains(values, function) | {
            "x": function.value(values["x"]),
            "fc1": first,
            "fc2": second,
            "bias": weights.vector(bias),
            "threshold": _number(float(values["threshold"]), function),
            "mask": mask_buffer(node, function),
        }
        read = first.bytes + _share(second.bytes + tensor_bytes("float32", (second.rows,)), experts, function.rows)
        function.call(spec, bindings, layer=node.meta["layer"], weight_bytes=read)

    return lower


def _signs(node: Node, function: Function) -> None:
    values = arguments(node)
    (matrix,) = values["weights"]
    neurons, dim = (int(size) for size in matrix.meta["val"].shape)
    row_bytes = sign_row_bytes(dim)
    experts = _chosen_experts(values["gains"])
    spec = PredictSignsSpec(neurons=neurons, dim=dim, row_bytes=row_bytes, rows=function.rows, **experts)
    bindings: Bindings = _gains(values, function) | {
        "x": function.value(values["x"]),
        "signs": function.shared.weights.signs(matrix),
        # A neuron fires if more columns agree in sign than the limit; `most` is the same bound for columns that differ.
        "most": _number(dim - sign_limit(dim, values["threshold"]) - 1, function),
        "mask": mask_buffer(node, function),
    }
    read = _share(neurons * row_bytes, experts, function.rows)
    function.call(spec, bindings, layer=node.meta["layer"], weight_bytes=read)


def _number(value: float, function: Function) -> Arg:
    """Return a number that kernels read, so that layers that differ in it share the kernel."""
    return function.shared.weights.computed(f"number.{value!r}", (1,), lambda _: torch.tensor([value]))


PREDICTOR_LOWERINGS = Registry[Lowering](
    "predictor kernel",
    "picompile.predictor_kernels",
    Callable,
    {"learned": _low_rank(relu=False), "learned-relu": _low_rank(relu=True), "sign": _signs},
)


@lowers(SPARSE_FFN)
def lower_sparse_ffn(node: Node, function: Function) -> None:
    """Append the call of a feed-forward block.

    With `exact` the gating matrix is a tensor of its own, because it is read in full. Matrices whose rows are skipped
    are interleaved in a bundle.

    Where the kernel of a predictor has made a mask, the block computes the neurons of that mask; elsewhere all. Without
    one, a block with limits of its gates is lowered as with `exact`: the gates decide.

    A block of experts computes neurons of those that each token has chosen, whatever else says which neurons it
    computes.
    """
    if is_whole_block(node):
        _lower_whole(node, function)
        return
    values, weights = arguments(node), function.shared.weights
    kind = arguments(values["mask"])["kind"]
    layer, part = node.meta["layer"], node.meta.get("neurons", "all")
    gated = values["gate"] is not None
    parts = [values["gate"], values["up"], values["down"]] if gated else [values["up"], values["down"]]
    # The mask is fetched before x, because the other side may send both in one transfer.
    masked = _mask(values["mask"], values["neurons"], function)
    bindings = _gains(values, function) | {"x": function.value(values["x"]), "y": function.result(node)}
    gates_decide = kind == "exact" or (values["gate_limits"] is not None and predictor_kind(kind).in_block)
    decide = weights.matrix(parts.pop(0)) if gates_decide else None
    bundle = weights.bundle(f"layers.{layer}.ffn.neurons" + ("" if part == "all" else f".{part}"), parts)
    if decide is not None:
        bindings["decide_w"] = decide
        if decide.format != bundle.format:
            raise UnsupportedGraphError(f"{node.name}: its matrices are {decide.format} and {bundle.format}")
    bindings |= masked | {"neuron_w": bundle}
    spec = _rows_spec(node, function, bindings, bundle.rows // len(parts))
    rows, kept_rows = len(parts), _kept_rows(values, len(parts), gates_decide)
    counted = FfnPart(layer, part, spec.row_neurons, predictor=kind, stats_row=0, rows=rows, kept_rows=kept_rows)
    counted = replace(counted, experts=spec.experts, chosen=spec.chosen)
    bindings |= {"stats": _statistics(function, counted)}
    bindings |= function.vectors(values, "gate_bias", "up_bias", "down_bias", *NEURON_LIMITS)
    if streams(node, bundle, function):
        stream_block(spec, bindings, node, function)
    else:
        call_block(spec, bindings, function, layer, _chosen_bytes(_experts(values), function.rows, bindings))


def _rows_spec(node: Node, function: Function, bindings: Bindings, neurons: int) -> FfnSpec:
    """Return the spec of a block of `neurons` whose rows are read neuron by neuron, given its matrices and its mask."""
    values, masked = arguments(node), "mask" in bindings
    matrix = bindings["neuron_w"]
    assert isinstance(matrix, PackedMatrix)
    return FfnSpec(
        kind="exact" if "decide_w" in bindings else "masked" if masked else "dense",
        format=matrix.format,
        neurons=neurons,
        dim=dimension(node) - values["squares"],
        rows=function.rows,
        gated=values["gate"] is not None,
        activation=values["activation"],
        up_activation=values["up_activation"],
        gate_bias=values["gate_bias"] is not None,
        up_bias=values["up_bias"] is not None,
        down_bias=values["down_bias"] is not None,
        mask_columns=dimension(values["mask"]) if "table" in bindings else None,
        squares=values["squares"],
        rowwise=function.mode == "sequences" and not masked,
        in_tiles=function.mode == "chunk" and masked,
        gate_limits=values["gate_limits"] is not None,
        output_limits=values["output_limits"] is not None,
        **_experts(values),
    )


def _gains(values: Mapping[str, Any], function: Function) -> Bindings:
    """Return the bindings of the gains and biases of experts; none for a block without experts."""
    if values["gains"] is None:
        return {}
    bindings: Bindings = {"gains": function.value(values["gains"])}
    if values.get("expert_bias") is not None:
        bindings["expert_bias"] = function.shared.weights.flat(values["expert_bias"])
    return bindings


def _experts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a spec that are of experts; none for a block without experts."""
    experts = _chosen_experts(values["gains"])
    return experts | {"expert_bias": values["expert_bias"] is not None} if experts else {}


def _chosen_experts(gains: Node | None) -> dict[str, int]:
    """Return how many experts gains are of, and how many of these a token chooses, as specs have them."""
    return {} if gains is None else {"experts": dimension(gains), "chosen": arguments(gains)["chosen"]}


def _chosen_bytes(experts: Mapping[str, Any], rows: int, bindings: Bindings) -> int | None:
    """Return the bytes of the experts that `rows` tokens can choose; None for a block without experts."""
    if not experts:
        return None
    return _share(sum(each.bytes for each in bindings.values() if isinstance(each, PackedMatrix)), experts, rows)


def _share(whole: int, experts: Mapping[str, int], rows: int) -> int:
    """Return how many of the bytes of all experts are of those that `rows` tokens can choose."""
    if not experts:
        return whole
    return whole // experts["experts"] * min(experts["experts"], experts["chosen"] * rows)


def _lower_whole(node: Node, function: Function) -> None:
    """Append the call of a block that computes every neuron, or those of chosen experts, with matrices in panels."""
    values, layer = arguments(node), node.meta["layer"]
    names = ("gate", "up") if values["gate"] is not None else ("up",)
    operands = [*(values[name] for name in names), dequantized(values["down"])]
    matrices = function.shared.weights.whole_matrices(operands, block=True)
    if not all(matrix.panels for matrix in matrices):
        raise UnsupportedGraphError(f"{node.name}: its matrices are not in panels, as its down matrix is packed for")
    experts = _experts(values)
    spec = (ExpertsSpec if experts else WholeFfnSpec)(
        formats=tuple(matrix.format for matrix in matrices),
        neurons=matrices[0].rows,
        dim=dimension(node),
        rows=function.rows,
        gated=len(names) == 2,
        activation=values["activation"],
        up_activation=values["up_activation"],
        gate_bias=values["gate_bias"] is not None,
        up_bias=values["up_bias"] is not None,
        down_bias=values["down_bias"] is not None,
        activation_bytes=function.activation_bytes,
        counts=function.name in DECODING,
        **experts,
    )
    part = node.meta.get("neurons", "all")
    counted = FfnPart(layer, part, spec.row_neurons, predictor="none", stats_row=0, rows=len(matrices), kept_rows=0)
    counted = replace(counted, **{name: experts[name] for name in ("experts", "chosen") if experts})
    bindings = _gains(values, function) | {"x": function.value(values["x"]), "y": function.result(node)}
    bindings |= {f"{name}_w": matrix for name, matrix in zip((*names, "down"), matrices, strict=True)}
    bindings |= function.vectors(values, "gate_bias", "up_bias", "down_bias") | {
        "stats": _statistics(function, counted)
    }
    function.call(spec, bindings, layer=layer, weight_bytes=_chosen_bytes(experts, function.rows, bindings))


def _mask(mask: Node, neurons: Node | None, function: Function) -> Bindings:
    """Return the binding of the mask if a predictor kernel made one.

    For a part of a split block, also that of the table that maps the part's neurons to columns of the mask.
    """
    if not function.has(mask):
        return {}
    bindings: Bindings = {"mask": function.value(mask)}
    # A mask that the accelerator sent has only the columns of the host's neurons, so it needs no table.
    if neurons is None or (function.device == "host" and mask in function.counts):
        return bindings
    return bindings | {"table": function.shared.weights.numbers(neurons)}


def _kept_rows(values: Mapping[str, Any], rows: int, gates_decide: bool) -> int:
    """Return how many of a neuron's `rows` rows in the bundle are read only if it is above its limits.

    They are the last ones: down and, where a mask names the neurons, also up. With both limits up counts for every
    neuron of the mask: nothing counts those that only the limit of the output leaves out.
    """
    if values["output_limits"] is not None:
        return 1
    return rows - 1 if values["gate_limits"] is not None and not gates_decide else 0


def _statistics(function: Function, counted: FfnPart) -> Arg:
    """Return the counter row for `stats`. All functions that read prompts share one row, which is never read."""
    if function.name not in DECODING:
        return function.unused_counters
    if function.name == "batch":
        place = (counted.layer, counted.part)
        (row,) = (each.stats_row for each in function.shared.ffn if (each.layer, each.part) == place)
    else:
        row = function.shared.stats_rows
        function.shared.ffn.append(replace(counted, stats_row=row))
    return function.counters(row)
