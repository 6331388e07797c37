"""The feed-forward block of a few sequences' next tokens, each with a mask of its own.

Where the masks together name a small part of all neurons, each token computes its own ones as in `ffn_one`: what one
token has read, the next finds in the cache. Where they name more, every neuron is computed for all, as in a chunk:
products of tiles take so much less time for each neuron.
"""

from tvm import tirx

from picompile_codegen.kernels.dot import Vector
from picompile_codegen.kernels.ffn_chunk import ChunkMemory, compute_chunk
from picompile_codegen.kernels.ffn_list import NeuronList, declare_list, list_neurons
from picompile_codegen.kernels.ffn_shape import FfnArguments
from picompile_codegen.kernels.ffn_slice import Slices, compute_slice
from picompile_codegen.kernels.kernel import KernelFunction
from picompile_codegen.kernels.quantized import QuantizedVector, quantize_to, vector_sizes
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, local, loop, parallel, when
from picompile_codegen.kernels.vector import LANES, at, blocks, load, splat, store

# Tasks of a token: a few tokens are to keep more threads than there are tokens busy.
_SLICES = 4
# The share of neurons, in percent, beyond which all are computed. Measured at 5632 x 2048, see docs/benchmarks.md.
_DENSE_PERCENT = 40


def ffn_batch(function: KernelFunction, arguments: FfnArguments) -> None:
    """Declares the rest of the arguments and writes the body."""
    shape = arguments.shape
    listed = declare_list(function, arguments)
    if listed is None:
        raise ValueError("a batch of tokens is computed by masks")
    counts = function.scratch("counts", "int32", shape.rows)
    vectors = _declare_vectors(function, arguments)
    slices = Slices.declare(function, shape.rows * _SLICES, shape.dim)
    memory = ChunkMemory.declare(function, shape, arguments.bundle.scale is not None)
    y = function.floats("y", shape.rows, shape.dim)
    tokens = function.tokens(shape.rows)

    with parallel(tokens) as token:
        counts[token] = list_neurons(arguments, listed, token).count
        if vectors is not None:
            bytes_, scales, offsets = vectors
            quantize_to(arguments.x, token, arguments.bundle, QuantizedVector(bytes_, scales, offsets, token))
    computed = local(1, dtype="int32")
    computed[0] = 0
    with loop(0, tokens) as token:
        computed[0] = computed[0] + counts[token]
    total = bind(computed[0])
    limit = bind(tokens * (shape.neurons * _DENSE_PERCENT // 100))
    with when(total > limit):
        compute_chunk(arguments, memory, y, tokens)
        _count(arguments.stats, tokens * shape.neurons, None, 0)
    with when(total <= limit):
        with parallel(tokens * _SLICES) as index:
            token = bind(index // _SLICES)
            quantized = None if vectors is None else QuantizedVector(*vectors, token)
            neurons = NeuronList(listed.neurons, token, bind(counts[token]), None)
            vector = Vector(arguments.x, token, quantized)
            compute_slice(arguments, vector, neurons, slices, index, index - token * _SLICES, _SLICES)
        with parallel(tokens) as token:
            _sum_slices(arguments, slices.y, token, y)
        _count(arguments.stats, total, slices.nonzero, tokens * _SLICES)


def _declare_vectors(function: KernelFunction, arguments: FfnArguments) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Memory for the tokens' bytes, where the matrix has bytes."""
    bundle, rows = arguments.bundle, arguments.shape.rows
    if bundle.scale is None:
        return None
    count, padded = vector_sizes(bundle)
    numbers = function.scratch("vector_bytes", "int8", rows, -(-count // 64) * 64)
    scales = function.scratch("vector_scales", "float32", rows, padded)
    return numbers, scales, function.scratch("vector_offsets", "float32", rows, padded) if bundle.offset else None


def _sum_slices(arguments: FfnArguments, slices: Tensor, token: Expr, y: Tensor) -> None:
    """y = down_bias + the token's slices, in order."""

    def add_up(c: Expr, valid: int) -> None:
        bias = arguments.down_bias
        value = local(LANES)
        value[at(0)] = splat(0.0) if bias is None else load(bias, c, valid=valid)
        for i in range(_SLICES):
            value[at(0)] = value[at(0)] + load(slices, token * _SLICES + i, c, valid=valid)
        store(y, token, c, value=value[at(0)], valid=valid)

    blocks(arguments.shape.dim, add_up)


def _count(stats: Tensor, computed: Expr, nonzero: Tensor | None, slices: Expr) -> None:
    """Where all neurons were computed, nobody counted those that fired: they are counted as fired."""
    stats[0] = stats[0] + tirx.Cast("int64", computed)
    if nonzero is None:
        stats[1] = stats[1] + tirx.Cast("int64", computed)
        return
    with loop(0, slices) as index:
        stats[1] = stats[1] + tirx.Cast("int64", nonzero[index])
