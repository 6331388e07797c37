"""Blocks whose weights stay with the host, on an accelerator: they come slice by slice while it computes.

Two stages in the accelerator's memory take turns: while the neurons of one are multiplied, the next slice is copied to
the other. A slice is a block of its own, with as many tokens; the results of all slices are added in order, so that
nothing depends on when a copy arrives. Each weight crosses the bus once for a chunk of a prompt.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch.fx import Node

from picompile_codegen.lowering.arena import align
from picompile_codegen.lowering.counted import call_block
from picompile_codegen.lowering.function import Bindings, Function
from picompile_codegen.lowering.packing import PackedMatrix
from picompile_codegen.lowering.program import ITEM_BYTES, Arg
from picompile_codegen.lowering.slices import slices_of
from picompile_codegen.specs import AddSpec, FfnSpec, UploadSpec

# Vectors that have an element for each neuron.
_OF_NEURONS = ("gate_bias", "up_bias", "gate_limits", "output_limits")


def stream_block(spec: FfnSpec, bindings: Bindings, node: Node, function: Function) -> None:
    """Append the calls of a block `spec` whose weights lie with the host, to which `bindings` leads."""
    matrices = {name: each for name, each in bindings.items() if isinstance(each, PackedMatrix)}
    rest = {name: each for name, each in bindings.items() if isinstance(each, Arg)}
    function.shared.streamed |= dict.fromkeys(each.name for each in matrices.values())
    neuron_bytes = sum(each.bytes for each in matrices.values()) // spec.neurons
    slices, shape = list(slices_of(spec.neurons, neuron_bytes)), (spec.rows, spec.dim + spec.squares)
    total: Arg | None = None
    for start, neurons in slices:
        y = rest["y"] if len(slices) == 1 else function.buffer("slice", "float32", shape)
        sliced = replace(spec, neurons=neurons, down_bias=spec.down_bias and start == 0)
        staged: Bindings = {**_vectors(rest, start, neurons), **_staged(matrices, spec, start, neurons, function)}
        call_block(sliced, staged | {"y": y}, function, node.meta["layer"])
        if total is not None:
            is_last = (start, neurons) == slices[-1]
            added = rest["y"] if is_last else function.buffer("sum", "float32", shape)
            kernel = function.kernel(AddSpec(shape[1], spec.rows))
            function.call(kernel, {"a": total, "b": y, "y": added}, op="add")
            y = added
        total = y


def _vectors(bindings: Mapping[str, Arg], start: int, neurons: int) -> dict[str, Arg]:
    """Return the bindings of a slice, all but those of matrices: of vectors with an element for each neuron, its
    part."""
    found = dict(bindings)
    for name in _OF_NEURONS:
        if name in found:
            offset = found[name].offset + start * ITEM_BYTES["float32"]
            found[name] = replace(found[name], shape=(neurons,), offset=offset)
    return found


def _staged(
    matrices: Mapping[str, PackedMatrix], spec: FfnSpec, start: int, neurons: int, function: Function
) -> dict[str, PackedMatrix]:
    """Append the copies of a slice's weights to the next stage; return the matrices there."""
    stage, at, found = function.next_stage(), 0, dict[str, PackedMatrix]()
    for name, matrix in matrices.items():
        rows = matrix.rows // spec.neurons
        found[name] = replace(matrix, name=stage, rows=neurons * rows, space="buffer", offset=at)
        _upload(function, matrix, start * rows * matrix.row_bytes, found[name])
        at = align(at + found[name].bytes)
    function.shared.stage_bytes = max(function.shared.stage_bytes, at)
    return found


def _upload(function: Function, matrix: PackedMatrix, offset: int, part: PackedMatrix) -> None:
    source = Arg("weight", matrix.name, "uint8", (part.bytes,), offset)
    target = Arg("buffer", part.name, "uint8", (part.bytes,), part.offset)
    kernel = function.kernel(UploadSpec(part.bytes))
    function.call(kernel, {"source": source, "y": target}, op="upload")
