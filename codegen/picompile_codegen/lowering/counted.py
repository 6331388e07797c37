"""Kernels that take the number of their neurons as an argument, for layers that differ in it.

A plan gives each layer another number of hot neurons. A kernel for each would make dozens of one, and as much more work
for the compiler of CUDA code. So one is made for the largest number. Where all layers have the same number, it is a
constant, which is nothing to read.
"""

from dataclasses import fields, replace
from typing import Any

import torch

from picompile_codegen.lowering.function import DECODING, Bindings, Function
from picompile_codegen.lowering.packing import PackedMatrix
from picompile_codegen.lowering.program import Arg
from picompile_codegen.specs import CountedFfnSpec, CountedSendMaskSpec, FfnSpec, SendMaskSpec


def call_block(
    spec: FfnSpec, bindings: Bindings, function: Function, layer: int, weight_bytes: int | None = None
) -> None:
    """Append the call of a feed-forward block with the arguments `bindings`; `weight_bytes` as in `Function.call`."""
    most = _most_neurons(spec, function)
    if most is not None:
        bindings = bindings | {"count": _number(spec.neurons, function)}
        if spec.is_masked and spec.mask_columns is None:
            bindings["mask"] = _flat(bindings["mask"], spec.rows * spec.neurons)
        spec = CountedFfnSpec(**_values(spec) | {"neurons": most})
    function.call(spec, bindings, layer=layer, weight_bytes=weight_bytes)


def call_send_mask(spec: SendMaskSpec, bindings: Bindings, function: Function) -> None:
    """Append the call that sends the host's part of a mask."""
    bounds = function.shared.bounds
    if bounds.sent is not None:
        bindings = bindings | {"columns": _number(spec.columns, function)}
        bindings["out_mask"] = _flat(bindings["out_mask"], spec.rows * spec.columns)
        spec = CountedSendMaskSpec(**_values(spec) | {"columns": bounds.sent}, in_words=bounds.sends_words)
    function.call(spec, bindings)


def _most_neurons(spec: FfnSpec, function: Function) -> int | None:
    """Return how many neurons the kernel of a block is for, None for one that is made for the block's own number."""
    bounds, decodes = function.shared.bounds, function.name in DECODING
    if function.device == "host":
        return bounds.listed if decodes and spec.is_masked else None
    # Where each part predicts for itself, that kernel has the part's own number as well.
    if spec.is_masked and spec.mask_columns is None:
        return None
    return bounds.decoded if decodes else bounds.whole


def _flat(mask: Arg | PackedMatrix, elements: int) -> Arg:
    assert isinstance(mask, Arg)
    return replace(mask, dtype="uint8", shape=(elements,))


def _values(spec: FfnSpec | SendMaskSpec) -> dict[str, Any]:
    return {field.name: getattr(spec, field.name) for field in fields(spec)}


def _number(count: int, function: Function) -> Arg:
    return function.shared.weights.integers(f"count.{count}", 1, lambda _: torch.tensor([count]))
