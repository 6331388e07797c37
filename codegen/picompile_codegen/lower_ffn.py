"""How a feed-forward block becomes a kernel call."""

from torch.fx import Node

from picompile_codegen import kernels
from picompile_codegen.function import DECODING, STATS_ROW_BYTES, Bindings, Function, dimension
from picompile_codegen.program import Arg, FfnPart
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.nodes import arguments


def lower_sparse_ffn(node: Node, function: Function) -> None:
    """`exact` stores the deciding matrix apart, since it is read in full; what is skipped lies together in a bundle.

    Where the kernel of a predictor has made a mask, the block computes the neurons of that mask; elsewhere all.
    """
    values, weights = arguments(node), function.shared.weights
    kind = arguments(values["mask"])["kind"]
    layer, part = node.meta["layer"], node.meta.get("device", "all")
    gated = values["gate"] is not None
    parts = [values["gate"], values["up"], values["down"]] if gated else [values["up"], values["down"]]
    # Before x, which may come with it.
    masked = _mask(values["mask"], values["neurons"], function)
    bindings: Bindings = {"x": function.value(values["x"]), "y": function.result(node)}
    decide = weights.matrix(parts.pop(0)) if kind == "exact" else None
    bundle = weights.bundle(f"layers.{layer}.ffn.neurons" + ("" if part == "all" else f".{part}"), parts)
    if decide is not None:
        bindings["decide_w"] = decide
        if decide.format != bundle.format:
            raise UnsupportedGraphError(f"{node.name}: its matrices are {decide.format} and {bundle.format}")
    if function.device == "device" and part == "cold":
        function.shared.streamed |= dict.fromkeys(each.name for each in (decide, bundle) if each is not None)
    neurons = bundle.rows // len(parts)
    bindings |= masked | {"neuron_w": bundle, "stats": _statistics(function, layer, part, neurons, kind)}
    kernel = function.kernel(
        kernels.ffn,
        kind="exact" if kind == "exact" else "masked" if masked else "dense",
        format=bundle.format,
        neurons=neurons,
        dim=dimension(node),
        rows=function.rows,
        gated=gated,
        activation=values["activation"],
        up_activation=values["up_activation"],
        gate_bias=values["gate_bias"] is not None,
        up_bias=values["up_bias"] is not None,
        down_bias=values["down_bias"] is not None,
        mask_columns=dimension(values["mask"]) if "table" in masked else None,
    )
    bindings |= function.vectors(values, "gate_bias", "up_bias", "down_bias")
    function.call(kernel, bindings, op="ffn", layer=layer)


def _mask(mask: Node, neurons: Node | None, function: Function) -> Bindings:
    """The mask that a kernel made for this block, with the columns that its rows are, where it is a part."""
    if not function.has(mask):
        return {}
    bindings: Bindings = {"mask": function.value(mask)}
    # What the device has sent to the host has the columns of its neurons only.
    if neurons is None or (function.device == "host" and mask in function.counts):
        return bindings
    return bindings | {"table": function.shared.weights.numbers(neurons)}


def _statistics(function: Function, layer: int, part: str, neurons: int, kind: str) -> Arg:
    """Where a kernel counts its neurons. Prompts are not counted: their kernels share a row that nobody reads."""
    if function.name not in DECODING:
        return Arg("buffer", function.own("stats.unused"))
    if function.name == "batch":
        (row,) = (each.stats_row for each in function.shared.ffn if (each.layer, each.part) == (layer, part))
    else:
        row = len(function.shared.ffn)
        function.shared.ffn.append(FfnPart(layer, part, neurons, kind, row))
    name = function.own("stats.batch" if function.name == "batch" else "stats")
    return Arg("buffer", name, shape=(2,), offset=row * STATS_ROW_BYTES)
