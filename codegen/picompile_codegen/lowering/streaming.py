"""Weights that stay with the host, on an accelerator: they come slice by slice while it computes.

Two staging buffers of the accelerator take turns: while one is multiplied with, the next slice is copied to the other.
Each weight crosses the bus once for a chunk of a prompt.

1. A slice of a feed-forward block has some of its neurons, and is a block of its own, with as many tokens. The results
   of all slices are added in order, so that nothing depends on when a copy arrives.
2. A slice of a projection has some of its outputs. The results lie one behind the other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch.fx import Node

from picompile_codegen.lowering.arena import align
from picompile_codegen.lowering.counted import call_block
from picompile_codegen.lowering.function import Bindings, Function
from picompile_codegen.lowering.packing import PackedMatrix
from picompile_codegen.lowering.program import Arg
from picompile_codegen.lowering.slices import slices_of
from picompile_codegen.specs import AddSpec, FfnSpec, JoinColumnsSpec, LinearSpec, UploadSpec
from picompile_codegen.specs.arguments import ITEM_BYTES
from picompile_passes.dialect import OPERATORS
from picompile_passes.graph.operands import NEURON_OPERANDS

# Vectors that have an element for each neuron.
_OF_NEURONS = tuple(name for name in NEURON_OPERANDS if OPERATORS["sparse_ffn"].dimensions[name] == "F")


def streams(node: Node, matrix: PackedMatrix | Arg, function: Function) -> bool:
    """Return whether `matrix`, which `node` is computed with on the current device, comes from the host."""
    return node in function.lent and matrix.name not in function.shared.resident


def stream_linear(spec: LinearSpec, bindings: Bindings, y: Arg, function: Function) -> None:
    """Append the calls of a projection `spec` whose weights lie with the host, which writes to `y`."""
    matrix = bindings["w"]
    assert isinstance(matrix, PackedMatrix)
    slices, parts = list(slices_of(spec.n, matrix.row_bytes)), Bindings()
    rest = {name: each for name, each in bindings.items() if isinstance(each, Arg)}
    for number, (start, outputs) in enumerate(slices):
        part = y if len(slices) == 1 else function.buffer("slice", "float32", (spec.rows, outputs))
        parts[f"x{number}"] = part
        staged = _staged({"w": matrix}, total=spec.n, start=start, count=outputs, function=function)
        sliced: Bindings = {**_vectors(rest, ("bias",), start, outputs), **staged, "y": part}
        function.call(replace(spec, n=outputs), sliced)
    if len(slices) > 1:
        joined = JoinColumnsSpec(tuple(outputs for _, outputs in slices), spec.rows)
        function.call(joined, parts | {"y": y})


def stream_block(spec: FfnSpec, bindings: Bindings, node: Node, function: Function) -> None:
    """Append the calls of a block `spec` whose weights lie with the host, to which `bindings` leads."""
    matrices = {name: each for name, each in bindings.items() if isinstance(each, PackedMatrix)}
    rest = {name: each for name, each in bindings.items() if isinstance(each, Arg)}
    neuron_bytes = sum(each.bytes for each in matrices.values()) // spec.neurons
    slices, shape = list(slices_of(spec.neurons, neuron_bytes)), (spec.rows, spec.dim + spec.squares)
    total: Arg | None = None
    for start, neurons in slices:
        y = rest["y"] if len(slices) == 1 else function.buffer("slice", "float32", shape)
        sliced = replace(spec, neurons=neurons, down_bias=spec.down_bias and start == 0)
        staged: Bindings = {**_staged(matrices, total=spec.neurons, start=start, count=neurons, function=function)}
        staged |= _vectors(rest, _OF_NEURONS, start, neurons)
        call_block(sliced, staged | {"y": y}, function, node.meta["layer"])
        if total is not None:
            is_last = (start, neurons) == slices[-1]
            added = rest["y"] if is_last else function.buffer("sum", "float32", shape)
            function.call(AddSpec(shape[1], spec.rows), {"a": total, "b": y, "y": added})
            y = added
        total = y


def _vectors(bindings: Mapping[str, Arg], names: Sequence[str], start: int, count: int) -> dict[str, Arg]:
    """Return `bindings` with the part of a slice of those vectors that have an element for each of its rows."""
    found = dict(bindings)
    for name in names:
        if name in found:
            offset = found[name].offset + start * ITEM_BYTES["float32"]
            found[name] = replace(found[name], shape=(count,), offset=offset)
    return found


def _staged(
    matrices: Mapping[str, PackedMatrix], total: int, start: int, count: int, function: Function
) -> dict[str, PackedMatrix]:
    """Append the copies of a slice's weights to the next staging buffer; return the matrices there.

    The slice has `count` of `total` neurons or outputs, from `start` on.
    """
    function.shared.streamed |= dict.fromkeys(each.name for each in matrices.values())
    staging, at, found = function.next_staging(), 0, dict[str, PackedMatrix]()
    for name, matrix in matrices.items():
        rows = matrix.rows // total
        found[name] = replace(matrix, name=staging, rows=count * rows, space="buffer", offset=at)
        _upload(function, matrix, matrix.offset + start * rows * matrix.row_bytes, found[name])
        at = align(at + found[name].bytes)
    function.shared.staging_bytes = max(function.shared.staging_bytes, at)
    return found


def _upload(function: Function, matrix: PackedMatrix, offset: int, part: PackedMatrix) -> None:
    source = Arg("weight", matrix.name, dtype="uint8", shape=(part.bytes,), offset=offset)
    target = Arg("buffer", part.name, dtype="uint8", shape=(part.bytes,), offset=part.offset)
    function.call(UploadSpec(part.bytes), {"source": source, "y": target})
