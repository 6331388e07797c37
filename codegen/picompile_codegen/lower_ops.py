"""How each operator of the dialect becomes kernel calls: one function an operator, and the table of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from picompile_codegen import kernels
from picompile_codegen.function import STATS_ROW_BYTES, Bindings, Function, dimension
from picompile_codegen.packing import Evaluate
from picompile_codegen.program import Arg, FfnPart, Tensor
from picompile_passes import operands as op
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.nodes import arguments


def _vectors(function: Function, values: dict[str, Any], *names: str) -> Bindings:
    """The vectors among the operands `names`, those that are there."""
    return {name: function.shared.weights.vector(values[name]) for name in names if values[name] is not None}


def _embedding(node: Node, function: Function) -> None:
    values = arguments(node)
    matrix = function.shared.weights.matrix(values["weight"])
    kernel = function.shared.kernel(
        kernels.embedding,
        format=matrix.format,
        vocab=matrix.rows,
        dim=dimension(node),
        rows=function.rows,
        offset=values["offset"],
    )
    ids = Arg("buffer", values["ids"].name, shape=(function.rows,))
    bindings: Bindings = {"ids": ids, "w": matrix, "y": function.result(node)}
    # A lookup reads one row a token, not the table.
    function.call(kernel, bindings, op="embedding", weight_bytes=matrix.row_bytes * function.rows)


def _linear(node: Node, function: Function) -> None:
    values = arguments(node)
    matrix = function.shared.weights.matrix(values["weight"])
    kernel = function.shared.kernel(
        kernels.linear,
        format=matrix.format,
        n=dimension(node),
        k=dimension(values["x"]),
        rows=function.rows,
        bias=values["bias"] is not None,
    )
    is_head = any(user.op == "output" for user in node.users)
    y = Arg("buffer", function.logits) if is_head else function.result(node)
    bindings: Bindings = {"x": function.values[values["x"]], "w": matrix, "y": y}
    function.call(kernel, bindings | _vectors(function, values, "bias"), op="head" if is_head else "linear")


def _rms_norm(node: Node, function: Function) -> None:
    values = arguments(node)
    kernel = function.shared.kernel(kernels.rms_norm, dim=dimension(node), rows=function.rows, eps=values["eps"])
    bindings: Bindings = {"x": function.values[values["x"]], "y": function.result(node)}
    function.call(kernel, bindings | _vectors(function, values, "weight"), op="norm")


def _layer_norm(node: Node, function: Function) -> None:
    values = arguments(node)
    kernel = function.shared.kernel(
        kernels.layer_norm,
        dim=dimension(node),
        rows=function.rows,
        eps=values["eps"],
        weight=values["weight"] is not None,
        bias=values["bias"] is not None,
    )
    bindings: Bindings = {"x": function.values[values["x"]], "y": function.result(node)}
    function.call(kernel, bindings | _vectors(function, values, "weight", "bias"), op="norm")


def _rotary(node: Node, function: Function) -> None:
    values = arguments(node)
    head_dim, context = dimension(node) // values["heads"], function.shared.options.context
    kernel = function.shared.kernel(
        kernels.rotary, heads=values["heads"], head_dim=head_dim, rows=function.rows, context=context
    )
    bindings: Bindings = {"x": function.values[values["x"]], "y": function.result(node)}
    frequency, scaling = values["inverse_frequency"], values["scaling"]
    for name, of in (("cos", torch.cos), ("sin", torch.sin)):
        bindings[name] = function.shared.weights.computed(
            f"rotary.{name}.{frequency.target}.{scaling!r}",
            (context, head_dim // 2),
            _rotary_table(of, frequency, scaling, context),
        )
    function.call(kernel, bindings, op="rotary")


def _rotary_table(
    of: Callable[[torch.Tensor], torch.Tensor], frequency: Node, scaling: float, context: int
) -> Callable[[Evaluate], torch.Tensor]:
    """[context, head_dim / 2]: computed here in the arithmetic of the eager model, so that kernels need no sine."""

    def produce(evaluate: Evaluate) -> torch.Tensor:
        positions = torch.arange(context, dtype=torch.float32).unsqueeze(1)
        return of(positions * evaluate(frequency).to(torch.float32)) * scaling

    return produce


def extend_cache(node: Node, function: Function) -> Bindings:
    """Writes this step's keys and values into the cache of attention `node`; returns its two cache operands."""
    values, options = arguments(node), function.shared.options
    layer, kv_heads = values["layer"], values["kv_heads"]
    caches: Bindings = {}
    for side in ("k", "v"):
        head_dim = dimension(values[side]) // kv_heads
        name, shape = f"{side}.{layer}", (kv_heads, options.context, head_dim)
        function.shared.state.setdefault(name, Tensor(options.kv_dtype, shape))
        kernel = function.shared.kernel(
            kernels.cache_write,
            kv_heads=kv_heads,
            head_dim=head_dim,
            context=options.context,
            rows=function.rows,
            kv_dtype=options.kv_dtype,
        )
        cache = Arg("state", name)
        function.call(kernel, {"x": function.values[values[side]], "cache": cache}, op="cache", layer=layer)
        caches[f"{side}_cache"] = cache
    return caches


def _attention(node: Node, function: Function) -> None:
    values, options = arguments(node), function.shared.options
    caches = extend_cache(node, function)
    kernel = function.shared.kernel(
        kernels.attention,
        heads=values["heads"],
        kv_heads=values["kv_heads"],
        head_dim=dimension(values["q"]) // values["heads"],
        value_dim=dimension(values["v"]) // values["kv_heads"],
        context=options.context,
        rows=function.rows,
        kv_dtype=options.kv_dtype,
        scale=values["scale"],
        window=values["window"],
    )
    bindings: Bindings = {"q": function.values[values["q"]], "y": function.result(node)}
    function.call(kernel, bindings | caches, op="attention", layer=values["layer"])


def _sparse_ffn(node: Node, function: Function) -> None:
    """`exact` stores the deciding matrix apart, since it is read in full; what is skipped lies together in a bundle."""
    values, weights = arguments(node), function.shared.weights
    kind = arguments(values["mask"])["kind"]
    if kind not in ("exact", "none"):
        raise UnsupportedGraphError(f"{node.name}: there is no CPU kernel for predictor kind {kind!r}")
    layer, part = node.meta["layer"], node.meta.get("device", "all")
    gated = values["gate"] is not None
    parts = [values["gate"], values["up"], values["down"]] if gated else [values["up"], values["down"]]
    bindings: Bindings = {"x": function.values[values["x"]], "y": function.result(node)}
    if kind == "exact":
        bindings["decide_w"] = weights.matrix(parts.pop(0))
    bundle = weights.bundle(f"layers.{layer}.ffn.neurons" + ("" if part == "all" else f".{part}"), parts)
    neurons = bundle.rows // len(parts)
    bindings |= {"neuron_w": bundle, "stats": _statistics(function, layer, part, neurons, kind)}
    kernel = function.shared.kernel(
        kernels.ffn,
        kind="exact" if kind == "exact" else "dense",
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
    )
    function.call(
        kernel, bindings | _vectors(function, values, "gate_bias", "up_bias", "down_bias"), op="ffn", layer=layer
    )


def _statistics(function: Function, layer: int, part: str, neurons: int, kind: str) -> Arg:
    """Where a kernel counts its neurons. Only decode counts for the record; the rest share a row that nobody reads."""
    if function.name != "decode":
        return Arg("buffer", "stats.unused")
    row = len(function.shared.ffn)
    function.shared.ffn.append(FfnPart(layer, part, neurons, kind, row))
    return Arg("buffer", "stats", shape=(2,), offset=row * STATS_ROW_BYTES)


def _add(node: Node, function: Function) -> None:
    values = arguments(node)
    kernel = function.shared.kernel(kernels.add, dim=dimension(node), rows=function.rows)
    a, b = function.values[values["self"]], function.values[values["other"]]
    function.call(kernel, {"a": a, "b": b, "y": function.result(node)}, op="add")


def _nothing(node: Node, function: Function) -> None:
    """A predictor is part of the kernel of the block that it predicts for."""


_LOWERINGS: dict[Any, Callable[[Node, Function], None]] = {
    op.EMBEDDING: _embedding,
    op.LINEAR: _linear,
    op.RMS_NORM: _rms_norm,
    op.LAYER_NORM: _layer_norm,
    op.ROTARY: _rotary,
    op.ATTENTION: _attention,
    op.PREDICT: _nothing,
    op.SPARSE_FFN: _sparse_ffn,
    op.ADD: _add,
}


def lower_node(node: Node, function: Function) -> None:
    """Appends the calls of one node. Raises `UnsupportedGraphError` for an operator without a kernel."""
    lowering = _LOWERINGS.get(node.target)
    if lowering is None:
        raise UnsupportedGraphError(f"{node.name}: there is no kernel for {node.target}")
    lowering(node, function)
