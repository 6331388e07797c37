"""Kernels that take the number of their neurons as an argument, for layers that differ in it.

A plan gives each layer another number of hot neurons. A kernel for each would make dozens of one, and as much more work
for the compiler of CUDA code. So one is made for the largest number. Where all layers have the same number, it is a
constant, which is nothing to read.
"""

from dataclasses import fields, replace
from typing import Any

import torch

from picompile_codegen.lowering.function import DECODING, Bindings, Function
from picompile_codegen.lowering.program import Arg
from picompile_codegen.specs import CountedFfnSpec, CountedSendMaskSpec, FfnSpec, SendMaskSpec


def call_block(spec: FfnSpec, bindings: Bindings, function: Function, layer: int) -> None:
    """Append the call of a feed-forward block with the arguments `bindings`."""
    bounds = function.shared.bounds
    most = bounds.decoded if function.name in DECODING else bounds.whole
    # A mask of the block's own neurons has as many columns.
    if function.device == "device" and most is not None and (spec.mask_columns or not spec.is_masked):
        bindings = bindings | {"count": _number(spec.neurons, function)}
        spec = CountedFfnSpec(**_values(spec) | {"neurons": most})
    function.call(function.kernel(spec), bindings, op="ffn", layer=layer)


def call_send_mask(spec: SendMaskSpec, bindings: Bindings, function: Function) -> None:
    """Append the call that sends the host's part of a mask."""
    bounds = function.shared.bounds
    if bounds.sent is not None:
        bindings = bindings | {"columns": _number(spec.columns, function)}
        out = bindings["out_mask"]
        assert isinstance(out, Arg)
        bindings["out_mask"] = replace(out, dtype="uint8", shape=(spec.rows * spec.columns,))
        spec = CountedSendMaskSpec(**_values(spec) | {"columns": bounds.sent}, in_words=bounds.sends_words)
    function.call(function.kernel(spec), bindings, op="send")


def _values(spec: FfnSpec | SendMaskSpec) -> dict[str, Any]:
    return {field.name: getattr(spec, field.name) for field in fields(spec)}


def _number(count: int, function: Function) -> Arg:
    return function.shared.weights.integers(f"count.{count}", 1, lambda _: torch.tensor([count]))
