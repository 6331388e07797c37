"""How rotary embedding, the KV cache and attention become kernel calls."""

from collections.abc import Callable

import torch
from torch.fx import Node

from picompile_codegen import kernels
from picompile_codegen.function import Bindings, Function, dimension
from picompile_codegen.packing import Evaluate
from picompile_codegen.program import Arg, Tensor
from picompile_passes.nodes import arguments


def lower_rotary(node: Node, function: Function) -> None:
    """Appends the call of a rotary embedding."""
    values = arguments(node)
    head_dim, context = dimension(node) // values["heads"], function.shared.options.context
    kernel = function.shared.kernel(
        kernels.rotary,
        heads=values["heads"],
        head_dim=head_dim,
        rows=function.rows,
        context=context,
        mode=function.mode,
    )
    bindings: Bindings = {"x": function.values[values["x"]], "y": function.result(node)}
    frequency, scaling = values["inverse_frequency"], values["scaling"]
    for name, of in (("cos", torch.cos), ("sin", torch.sin)):
        bindings[name] = function.shared.weights.computed(
            f"rotary.{name}.{frequency.target}.{scaling!r}",
            (context, head_dim // 2),
            _rotary_table(of, frequency, scaling, context),
        )
    function.call(kernel, bindings | _places(function), op="rotary")


def _rotary_table(
    of: Callable[[torch.Tensor], torch.Tensor], frequency: Node, scaling: float, context: int
) -> Callable[[Evaluate], torch.Tensor]:
    """[context, head_dim / 2]: computed here in the arithmetic of the eager model, so that kernels need no sine."""

    def produce(evaluate: Evaluate) -> torch.Tensor:
        positions = torch.arange(context, dtype=torch.float32).unsqueeze(1)
        return of(positions * evaluate(frequency).to(torch.float32)) * scaling

    return produce


def _places(function: Function) -> Bindings:
    """Positions and slots of rows, which kernels for several sequences ask for."""
    return {name: Arg("buffer", name, shape=(function.rows,)) for name in ("positions", "slots")}


def extend_cache(node: Node, function: Function) -> Bindings:
    """Writes this step's keys and values into the cache of attention `node`; returns its two cache operands."""
    values, options = arguments(node), function.shared.options
    layer, kv_heads = values["layer"], values["kv_heads"]
    caches: Bindings = {}
    for side in ("k", "v"):
        head_dim = dimension(values[side]) // kv_heads
        name, shape = f"{side}.{layer}", (options.sequences, kv_heads, options.context, head_dim)
        function.shared.state.setdefault(name, Tensor(options.kv_dtype, shape))
        kernel = function.shared.kernel(
            kernels.cache_write,
            kv_heads=kv_heads,
            head_dim=head_dim,
            context=options.context,
            rows=function.rows,
            kv_dtype=options.kv_dtype,
            mode=function.mode,
            sequences=options.sequences,
        )
        cache = Arg("state", name)
        bindings: Bindings = {"x": function.values[values[side]], "cache": cache}
        function.call(kernel, bindings | _places(function), op="cache", layer=layer)
        caches[f"{side}_cache"] = cache
    return caches


def lower_attention(node: Node, function: Function) -> None:
    """Appends the calls that extend the cache and attend to it."""
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
        mode=function.mode,
        sequences=options.sequences,
    )
    bindings: Bindings = {"q": function.values[values["q"]], "y": function.result(node)}
    function.call(kernel, bindings | caches | _places(function), op="attention", layer=values["layer"])
