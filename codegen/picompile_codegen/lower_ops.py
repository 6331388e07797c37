"""How each operator of the dialect becomes kernel calls: one function an operator, and the table of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from picompile_codegen import kernels
from picompile_codegen.function import Bindings, Function, dimension
from picompile_codegen.lower_ffn import lower_sparse_ffn
from picompile_codegen.lower_predict import lower_predict
from picompile_codegen.packing import Evaluate
from picompile_codegen.program import Arg, Tensor
from picompile_passes import operands as op
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.nodes import arguments


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
    function.call(kernel, bindings | function.vectors(values, "bias"), op="head" if is_head else "linear")


def _rms_norm(node: Node, function: Function) -> None:
    values = arguments(node)
    kernel = function.shared.kernel(kernels.rms_norm, dim=dimension(node), rows=function.rows, eps=values["eps"])
    bindings: Bindings = {"x": function.values[values["x"]], "y": function.result(node)}
    function.call(kernel, bindings | function.vectors(values, "weight"), op="norm")


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
    function.call(kernel, bindings | function.vectors(values, "weight", "bias"), op="norm")


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


def _add(node: Node, function: Function) -> None:
    values = arguments(node)
    kernel = function.shared.kernel(kernels.add, dim=dimension(node), rows=function.rows)
    a, b = function.values[values["self"]], function.values[values["other"]]
    function.call(kernel, {"a": a, "b": b, "y": function.result(node)}, op="add")


_LOWERINGS: dict[Any, Callable[[Node, Function], None]] = {
    op.EMBEDDING: _embedding,
    op.LINEAR: _linear,
    op.RMS_NORM: _rms_norm,
    op.LAYER_NORM: _layer_norm,
    op.ROTARY: _rotary,
    op.ATTENTION: _attention,
    op.PREDICT: lower_predict,
    op.SPARSE_FFN: lower_sparse_ffn,
    op.ADD: _add,
}


def lower_node(node: Node, function: Function) -> None:
    """Appends the calls of one node. Raises `UnsupportedGraphError` for an operator without a kernel."""
    lowering = _LOWERINGS.get(node.target)
    if lowering is None:
        raise UnsupportedGraphError(f"{node.name}: there is no kernel for {node.target}")
    lowering(node, function)
