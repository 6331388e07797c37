"""Rotary embedding, the KV cache and attention as kernel calls."""

from collections.abc import Callable

import torch
from torch.fx import Node

from picompile_codegen.lowering.function import Bindings, Function, dimension
from picompile_codegen.lowering.packing import Evaluate
from picompile_codegen.lowering.program import Arg, ProgramTensor
from picompile_codegen.specs import AttentionSpec, CacheWriteSpec, RotarySpec
from picompile_codegen.specs.arguments import SCALED, cache_data, scale_groups
from picompile_passes.graph.nodes import arguments, is_call
from picompile_passes.graph.operands import ATTENTION, ROTARY


def lower_rotary(node: Node, function: Function) -> None:
    """Append the call of a rotary embedding, unless attention does its work."""
    if all(is_call(user, ATTENTION) and _turned_inside(user, function) for user in node.users):
        return
    values = arguments(node)
    kernel = function.kernel(
        RotarySpec(
            heads=values["heads"],
            head_dim=dimension(node) // values["heads"],
            rows=function.rows,
            context=function.shared.options.context,
            mode=function.mode,
        )
    )
    bindings: Bindings = {"x": function.value(values["x"]), "y": function.result(node)}
    function.call(kernel, bindings | _angles(node, function), op="rotary")


def _angles(node: Node, function: Function) -> Bindings:
    """Return the tables of cosines and sines of a rotary embedding, float32 [context, head_dim / 2]."""
    values, context = arguments(node), function.shared.options.context
    frequency, scaling = values["inverse_frequency"], values["scaling"]
    return {
        name: function.shared.weights.computed(
            f"rotary.{name}.{frequency.target}.{scaling!r}",
            (context, dimension(node) // values["heads"] // 2),
            _rotary_table(of, frequency, scaling, context),
            (frequency,),
        )
        for name, of in (("cos", torch.cos), ("sin", torch.sin))
    }


def _rotary_table(
    of: Callable[[torch.Tensor], torch.Tensor], frequency: Node, scaling: float, context: int
) -> Callable[[Evaluate], torch.Tensor]:
    """Return the producer of a table [context, head_dim / 2], in the arithmetic of the eager model: kernels need no
    sine."""

    def produce(evaluate: Evaluate) -> torch.Tensor:
        positions = torch.arange(context, dtype=torch.float32).unsqueeze(1)
        return of(positions * evaluate(frequency).to(torch.float32)) * scaling

    return produce


def _caches(node: Node, function: Function) -> dict[str, Arg]:
    """Return the caches of attention `node` by name: k and v, and with q8 and q4 k_scales and v_scales."""
    values, options = arguments(node), function.shared.options
    kv_heads, found = values["kv_heads"], {}
    for side in ("k", "v"):
        dim, name = dimension(values[side]) // kv_heads, f"{side}.{values['layer']}"
        rows = (options.sequences, kv_heads, options.context)
        tensors = {side: (name, *cache_data(options.kv_dtype, dim))}
        if options.kv_dtype in SCALED:
            tensors[f"{side}_scales"] = (f"{name}.scale", "float16", scale_groups(dim))
        for key, (state, dtype, width) in tensors.items():
            function.shared.state.setdefault(state, ProgramTensor(dtype, (*rows, width), memory=function.device))
            found[key] = Arg("state", state)
    return found


def extend_cache(node: Node, function: Function) -> None:
    """Append the calls that write this step's keys and values into the cache of attention `node`."""
    values, options, caches = arguments(node), function.shared.options, _caches(node, function)
    for side in ("k", "v"):
        kernel = function.kernel(
            CacheWriteSpec(
                kv_heads=values["kv_heads"],
                head_dim=dimension(values[side]) // values["kv_heads"],
                context=options.context,
                rows=function.rows,
                kv_dtype=options.kv_dtype,
                mode=function.mode,
                sequences=options.sequences,
            )
        )
        bindings: Bindings = {"x": function.value(values[side]), "cache": caches[side]}
        bindings |= {"cache_scales": caches[f"{side}_scales"]} if options.kv_dtype in SCALED else {}
        function.call(kernel, bindings, op="cache", layer=values["layer"])


def lower_attention(node: Node, function: Function) -> None:
    """Append the calls that extend the cache and attend to it: one call where a step has one token of a sequence."""
    values, options = arguments(node), function.shared.options
    extend = function.mode != "chunk"
    turned = _turned_inside(node, function)
    if not extend:
        extend_cache(node, function)
    kernel = function.kernel(
        AttentionSpec(
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
            extend=extend,
            turn=turned,
            softcap=values["softcap"],
            slopes=values["slopes"] is not None,
            sinks=values["sinks"] is not None,
        )
    )
    bindings: Bindings = {f"{name[0]}_cache{name[1:]}": cache for name, cache in _caches(node, function).items()}
    for name in ("q", "k", "v"):
        source = arguments(values[name])["x"] if turned and name != "v" else values[name]
        bindings[name] = function.value(source)
    if turned:
        bindings |= _angles(values["q"], function)
    bindings |= {"y": function.result(node), **function.vectors(values, "slopes", "sinks")}
    function.call(kernel, bindings, op="attention", layer=values["layer"], window=values["window"])


def _turned_inside(node: Node, function: Function) -> bool:
    """Return whether attention `node` turns q and k itself: both are turned, alike, and no other node reads them."""
    values = arguments(node)
    pair = [values["q"], values["k"]]
    if function.mode == "chunk" or not all(is_call(each, ROTARY) and list(each.users) == [node] for each in pair):
        return False
    q, k = (arguments(each) for each in pair)
    alike = all(q[name] == k[name] for name in ("inverse_frequency", "scaling"))
    return alike and (q["heads"], k["heads"]) == (values["heads"], values["kv_heads"])
