"""Activations in 8 bits: what products with q8 and q4 weights are made of.

Each 32 consecutive activations share a scale, the largest magnitude over 127; each becomes the nearest multiple of it,
the even one of two. That is what llama.cpp does as well (Q8_0), with a float32 scale in place of a float16 one.

Σ (raw + offset) · scale_w · bytes · scale_x falls apart into an integer sum, times both scales, and offset · scale_w ·
scale_x · Σ bytes. Of the second, all but scale_w is the same for every row: `offsets` holds it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cpu.integers import byte_inverse, byte_scale
from picompile_codegen.cpu.matrix import KernelMatrix, each_group
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, local, maximum
from picompile_codegen.cpu.vector import LANES, at, highest, load, splat, store, total
from picompile_passes.dialect.formats import GROUP

# Scales are read eight at a time, so there are some for groups that do not exist: zeros.
SCALES_TOGETHER = LANES


@dataclass(frozen=True)
class QuantizedRows:
    """Activations of a chunk: `bytes` int8 [rows, groups · 32], `scales` float32 and `offsets` int32 [rows, padded]."""

    bytes: KernelTensor
    scales: KernelTensor
    offsets: KernelTensor


@dataclass(frozen=True)
class QuantizedVector:
    """Row `row` of `bytes` int8 [rows, groups · 32] and of `scales` and `offsets` float32 [rows, groups].

    Of scales and offsets there is one a group, and zeros up to a multiple of 8.

    For q4, two groups share 64 bytes, since two groups' low halves lie in the same 32 bytes of a row: columns 0 to 15
    of the first and of the second, then 16 to 31 of both. After an odd number of groups there is one of zeros.
    """

    bytes: KernelTensor
    scales: KernelTensor
    offsets: KernelTensor | None
    row: Expr


def padded_groups(groups: int) -> int:
    """Groups, rounded up to how many scales are read at a time."""
    return -(-groups // SCALES_TOGETHER) * SCALES_TOGETHER


def vector_sizes(matrix: KernelMatrix) -> tuple[int, int]:
    """Bytes and scales of a vector that meets rows of `matrix`."""
    in_pairs = matrix.format == "q4"
    return (matrix.groups + in_pairs * matrix.groups % 2) * GROUP, padded_groups(matrix.groups)


def quantize_vector(x: KernelTensor, row: Expr, matrix: KernelMatrix) -> QuantizedVector:
    """Quantizes row `row` of x float32 [rows, columns] for products with rows of `matrix`, or of any like it."""
    count, padded = vector_sizes(matrix)
    offsets = local(1, padded) if matrix.offset else None
    vector = QuantizedVector(local(1, count, dtype="int8"), local(1, padded), offsets, 0)
    quantize_to(x, row, matrix, vector)
    return vector


def quantize_to(x: KernelTensor, row: Expr, matrix: KernelMatrix, vector: QuantizedVector) -> None:
    """The same, into memory of `vector_sizes`."""
    in_pairs, padded = matrix.format == "q4", padded_groups(matrix.groups)
    for start in range(matrix.groups // LANES * LANES, padded, LANES):
        for tensor in (vector.scales, vector.offsets):
            if tensor is not None:
                store(tensor, vector.row, start, value=splat(0.0))

    def put(group: Expr, i: int, value: Expr) -> None:
        vector.bytes[vector.row, at(_place_in_pair(group, i) if in_pairs else group * GROUP + i)] = value

    def quantize(group: Expr, inputs: list[Expr]) -> None:
        scale, summed = quantize_group(inputs, lambda i, value: put(group, i, value))
        vector.scales[vector.row, group] = scale
        if vector.offsets is not None:
            vector.offsets[vector.row, group] = summed * scale * tirx.FloatImm("float32", matrix.offset)

    _each_group(x, row, matrix.columns, quantize)
    # Last: LLVM 22 makes invalid code where a local array is filled by stores of which the first ones are constant.
    if in_pairs and matrix.groups % 2:
        for half in (0, 16):
            start = _place_in_pair(matrix.groups, half)
            vector.bytes[vector.row, at(start, 16)] = tirx.Broadcast(tirx.IntImm("int8", 0), 16)


def quantize_row(x: KernelTensor, row: Expr, columns: int, out: QuantizedRows, offset: int) -> None:
    """Quantizes row `row` of x float32 [rows, columns] to the same row of `out`, with offset · Σ bytes by group."""

    def quantize(group: Expr, inputs: list[Expr]) -> None:
        def put(i: int, value: Expr) -> None:
            out.bytes[row, at(group * GROUP + i)] = value

        scale, summed = quantize_group(inputs, put)
        out.scales[row, group] = scale
        out.offsets[row, group] = tirx.Cast("int32", summed) * offset

    _each_group(x, row, columns, quantize)


def quantize_group(inputs: list[Expr], put: Callable[[int, Expr], None]) -> tuple[Expr, Expr]:
    """The scale of 32 activations and the sum of their bytes, float32; `put(i, values)` takes bytes i … i + 7."""
    largest = highest(_largest(inputs))
    inverse = bind(byte_inverse(bind(splat(largest))))
    rounded = [bind(tirx.nearbyint(value * inverse)) for value in inputs]
    for i, value in enumerate(rounded):
        put(i * LANES, tirx.Cast(f"int8x{LANES}", tirx.Cast(f"int32x{LANES}", value)))
    summed = total((rounded[0] + rounded[1]) + (rounded[2] + rounded[3]))
    # What is not a number or infinite must show: times zero it makes the scale NaN.
    return bind(byte_scale(largest, summed)), summed


def _each_group(x: KernelTensor, row: Expr, columns: int, body: Callable[[Expr, list[Expr]], None]) -> None:
    """Runs `body(group, its four vectors)`; what is past the end is zero."""

    def load_group(group: Expr, lane_counts: tuple[int, ...]) -> None:
        inputs = [bind(load(x, row, group * GROUP + i * LANES, valid=n)) for i, n in enumerate(lane_counts)]
        body(group, inputs + [splat(0.0)] * (GROUP // LANES - len(inputs)))

    each_group(columns, load_group)


def _place_in_pair(group: Expr, column: int) -> Expr:
    return group // 2 * (2 * GROUP) + column // 16 * GROUP + group % 2 * 16 + column % 16


def _largest(inputs: list[Expr]) -> Expr:
    magnitudes = [bind(tirx.abs(value)) for value in inputs]
    return maximum(maximum(magnitudes[0], magnitudes[1]), maximum(magnitudes[2], magnitudes[3]))
