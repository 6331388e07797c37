"""Rotary embedding, the KV cache and attention as kernel calls."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch.fx import Node

from picompile_codegen.lowering.function import Bindings, Function, dimension
from picompile_codegen.lowering.layouts import Evaluate
from picompile_codegen.lowering.operators import lowers, updates
from picompile_codegen.lowering.program import Arg
from picompile_codegen.lowering.state import state_tensors
from picompile_codegen.lowering.transfer import ABANDONED, WaitForValue, send, signal
from picompile_codegen.specs import AttentionSpec, BorrowCacheSpec, CacheWriteSpec, LendCacheSpec, RotarySpec
from picompile_passes.dialect.rotary import rotary_tables
from picompile_passes.formats import CACHE_FORMATS
from picompile_passes.graph.nodes import arguments, is_call
from picompile_passes.graph.operands import ATTENTION, ROTARY


@lowers(ROTARY)
def lower_rotary(node: Node, function: Function) -> None:
    """Append the call of a rotary embedding, unless attention does its work."""
    if all(is_call(user, ATTENTION) and _turned_inside(user, function) for user in node.users):
        return
    values = arguments(node)
    spec = RotarySpec(
        heads=values["heads"],
        head_dim=dimension(node) // values["heads"],
        **function.step | {"sequences": 1},
    )
    bindings: Bindings = {"x": function.value(values["x"]), "y": function.result(node)}
    function.call(spec, bindings | _angles(node, function))


def _angles(node: Node, function: Function) -> Bindings:
    """Return the tables of cosines and sines of a rotary embedding, float32 [context, head_dim / 2]."""
    values, context = arguments(node), function.shared.options.context
    frequency, scales = values["inverse_frequency"], (values["scaling"], values["still_scaling"])
    return {
        name: function.shared.weights.computed(
            f"rotary.{name}.{frequency.target}.{scales[0]!r}{'' if scales[1] == 1 else f'.{scales[1]!r}'}",
            (context, dimension(node) // values["heads"] // 2),
            _rotary_table(which, frequency, scales, context),
            (frequency,),
        )
        for which, name in enumerate(("cos", "sin"))
    }


def _rotary_table(
    which: int, frequency: Node, scales: tuple[float, float], context: int
) -> Callable[[Evaluate], torch.Tensor]:
    """Return the producer of the table of cosines (`which` 0) or sines (1): kernels need no sine."""

    def produce(evaluate: Evaluate) -> torch.Tensor:
        return rotary_tables(torch.arange(context), evaluate(frequency), *scales)[which]

    return produce


@updates(ATTENTION)
def extend_cache(node: Node, function: Function) -> None:
    """Append the calls that write this step's keys and values into the cache of attention `node`."""
    values, caches = arguments(node), state_tensors(node, function)
    x = {side: function.value(values[side]) for side in ("k", "v")}
    if node not in function.lent:
        _write(node, x, caches, function.shared.options.sequences, function)
        return
    arrivals = {}
    for side, value in x.items():
        dim = dimension(values[side])
        out = function.buffer(f"{side}.sent", "float32", (function.rows, dim), "shared")
        arrivals[side] = WaitForValue(out, send(function, value, out, dim))
    function.device = "host"
    received = {side: arrival(function) for side, arrival in arrivals.items()}
    _write(node, x=received, caches=caches, sequences=function.shared.options.sequences, function=function)
    function.device = "accelerator"


def _write(node: Node, x: Mapping[str, Arg], caches: Mapping[str, Arg], sequences: int, function: Function) -> None:
    """Append the calls that write keys and values `x` into `caches` for `sequences`."""
    values, options = arguments(node), function.shared.options
    for side in ("k", "v"):
        spec = CacheWriteSpec(
            kv_heads=values["kv_heads"],
            head_dim=dimension(values[side]) // values["kv_heads"],
            kv_dtype=options.kv_dtype,
            **function.step | {"sequences": sequences},
        )
        bindings: Bindings = {"x": x[side], "cache": caches[side]}
        bindings |= {"cache_scales": caches[f"{side}_scales"]} if options.kv_dtype in CACHE_FORMATS else {}
        function.call(spec, bindings, layer=values["layer"])


def _borrow_caches(node: Node, function: Function) -> dict[str, Arg]:
    """Append the calls that lend the accelerator the host's caches of attention `node`, of the step's sequence.

    The host copies what it has of earlier positions to shared memory, and the accelerator copies it to its own, where
    it adds the keys and values of this step. It sends these to the host, whose caches are whole then, too. In this
    order: whoever writes to shared memory knows that the other side has read what was there (see `shared_memory.py`).
    """
    options, layer = function.shared.options, arguments(node)["layer"]
    lends, lent = dict[str, LendCacheSpec](), dict[str, Arg]()
    function.device = "host"
    for key, cache in state_tensors(node, function).items():
        tensor = function.shared.state[cache.name]
        _, heads, _, width = tensor.shape
        lent[key] = function.buffer(f"{key}.lent", tensor.dtype, (heads, options.context * width), "shared")
        lends[key] = LendCacheSpec(heads, width, tensor.dtype, options.context, options.sequences)
        whole = replace(cache, shape=(options.sequences, heads, options.context * width))
        function.call(lends[key], {"cache": whole, "y": lent[key]}, layer=layer)
    flag, borrowed = signal(function), dict[str, Arg]()
    function.device = "accelerator"
    for key, lend in lends.items():
        heads, width, dtype = lend.kv_heads, lend.width, lend.dtype
        borrowed[key] = function.buffer(f"{key}.borrowed", dtype, (1, heads, options.context, width))
        y = replace(borrowed[key], shape=(heads, options.context * width))
        bindings: Bindings = {"source": lent[key], "flag": flag, "abandoned": ABANDONED, "y": y}
        function.call(BorrowCacheSpec(heads, width, dtype, options.context), bindings, layer=layer)
    extend_cache(node, function)
    x = {side: function.value(arguments(node)[side]) for side in ("k", "v")}
    _write(node, x, caches=borrowed, sequences=1, function=function)
    return borrowed


@lowers(ATTENTION)
def lower_attention(node: Node, function: Function) -> None:
    """Append the calls that extend the cache and attend to it: one call where a step has one token of a sequence."""
    values, options = arguments(node), function.shared.options
    extend = function.mode != "chunk"
    turned = _turned_inside(node, function)
    if node in function.lent:
        caches, sequences = _borrow_caches(node, function), 1
    else:
        caches, sequences = state_tensors(node, function), options.sequences
        if not extend:
            extend_cache(node, function)
    spec = AttentionSpec(
        heads=values["heads"],
        kv_heads=values["kv_heads"],
        head_dim=dimension(values["q"]) // values["heads"],
        value_dim=dimension(values["v"]) // values["kv_heads"],
        kv_dtype=options.kv_dtype,
        scale=values["scale"],
        window=values["window"],
        **function.step | {"sequences": sequences},
        extend=extend,
        turn=turned,
        softcap=values["softcap"],
        slopes=values["slopes"] is not None,
        sinks=values["sinks"] is not None,
    )
    bindings: Bindings = {f"{name[0]}_cache{name[1:]}": cache for name, cache in caches.items()}
    for name in ("q", "k", "v"):
        source = arguments(values[name])["x"] if turned and name != "v" else values[name]
        bindings[name] = function.value(source)
    if turned:
        bindings |= _angles(values["q"], function)
    bindings |= {"y": function.result(node), **function.vectors(values, "slopes", "sinks")}
    function.call(spec, bindings, layer=values["layer"], window=values["window"])


def _turned_inside(node: Node, function: Function) -> bool:
    """Return whether attention `node` turns q and k itself: both are turned, alike, and no other node reads them."""
    values = arguments(node)
    pair = [values["q"], values["k"]]
    if function.mode == "chunk" or not all(is_call(each, ROTARY) and list(each.users) == [node] for each in pair):
        return False
    q, k = (arguments(each) for each in pair)
    alike = all(q[name] == k[name] for name in ("inverse_frequency", "scaling", "still_scaling"))
    return alike and (q["heads"], k["heads"]) == (values["heads"], values["kv_heads"])
