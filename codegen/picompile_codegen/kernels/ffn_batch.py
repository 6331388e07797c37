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
from picompile_codegen.kernels.ffn_slice import compute_slice
from picompile_codegen.kernels.ffn_slices import Slices
from picompile_codegen.kernels.kernel import KernelFunction
from picompile_codegen.kernels.quantized import QuantizedVector, quantize_to, vector_sizes
from picompile_codegen.kernels.tensor import Tensor, bind, local, loop, parallel, when

# Tasks of a token: a few tokens are to keep more threads than there are tokens busy.
_SLICES = 4
# All neurons are computed where the masks name as many as so many whole blocks have, and so many percent of what all
# tokens would compute: tiles read every weight once, and then take less time for each. See docs/benchmarks.md.
DENSE_BLOCKS, DENSE_PERCENT = 2, 30


def ffn_batch(function: KernelFunction, arguments: FfnArguments) -> None:
    """Declares the rest of the arguments and writes the body."""
    shape = arguments.shape
    listed = declare_list(function, arguments)
    if listed is None:
        raise ValueError("a batch of tokens is computed by masks")
    counts = function.scratch("counts", "int32", shape.rows)
    vectors = _declare_vectors(function, arguments)
    slices = Slices.declare(function, arguments, _SLICES)
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
    limit = bind(shape.neurons * DENSE_BLOCKS + tokens * (shape.neurons * DENSE_PERCENT // 100))
    with when(total > limit):
        compute_chunk(arguments, memory, y, tokens)
        # Nobody counted those that fired: they are counted as fired.
        for i in range(2):
            arguments.stats[i] = arguments.stats[i] + tirx.Cast("int64", tokens * shape.neurons)
    with when(total <= limit):
        with parallel(tokens * _SLICES) as index:
            token = bind(index // _SLICES)
            quantized = None if vectors is None else QuantizedVector(*vectors, token)
            neurons = NeuronList(listed.neurons, token, bind(counts[token]), None)
            vector = Vector(arguments.x, token, quantized)
            compute_slice(arguments, vector, neurons, slices, index, index - token * _SLICES)
        slices.add_up(y, arguments.down_bias, shape.dim, tokens)
        slices.count(arguments.stats, total, tokens)


def _declare_vectors(function: KernelFunction, arguments: FfnArguments) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Memory for the tokens' bytes, where the matrix has bytes."""
    bundle, rows = arguments.bundle, arguments.shape.rows
    if bundle.scale is None:
        return None
    count, padded = vector_sizes(bundle)
    numbers = function.scratch("vector_bytes", "int8", rows, -(-count // 64) * 64)
    scales = function.scratch("vector_scales", "float32", rows, padded)
    return numbers, scales, function.scratch("vector_offsets", "float32", rows, padded) if bundle.offset else None
