"""The feed-forward block of one token, over the neurons that are predicted to fire.

1. The numbers of the neurons to compute are listed, in order (`ffn_list.py`): in `exact` by the deciding product of
   every neuron, in `masked` by the mask.
2. They are cut into SLICES equal runs (`ffn_slice.py`).
3. The slices' y are added up, in order.

The number of slices is fixed. So are then the order of all additions and every bit of y, for any number of threads.
"""

from tvm import tirx

from picompile_codegen.cpu.dot import Vector, prepare_vector
from picompile_codegen.cpu.ffn_chunk import ChunkMemory, compute_chunk, ffn_chunk
from picompile_codegen.cpu.ffn_neurons import FfnArguments, NeuronList, declare_list, list_neurons, make_list
from picompile_codegen.cpu.ffn_slices import Slices, compute_slice
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.quantized import QuantizedVector, quantize_to, vector_sizes
from picompile_codegen.cpu.tensor import KernelTensor, bind, local, loop, parallel, when, worth_a_region
from picompile_codegen.specs import FfnSpec

# Each has a y of its own, which costs time to add up; too few leave threads without work.
SLICES = 16


def ffn_one(function: KernelFunction, arguments: FfnArguments) -> None:
    """Declares the rest of the arguments and writes the body."""
    spec = arguments.spec
    memory = declare_list(function, arguments)
    slices = Slices.declare(function, arguments, SLICES)

    vector = prepare_vector(arguments.x, arguments.bundle)
    is_worth = worth_a_region(arguments.bundle.bytes)
    listed = None if memory is None else make_list(arguments, vector, memory)
    with parallel(SLICES, when_worth=is_worth) as index:
        compute_slice(arguments, vector, listed, slices, index, index)
    slices.add_up(arguments.y, arguments.down_bias, spec.dim, 1)
    slices.count(arguments.stats, spec.neurons if listed is None else listed.count, 1)


# The feed-forward block of a few sequences' next tokens, each with a mask of its own.
#
# Where the masks together name a small part of all neurons, each token computes its own ones as in `ffn_one`: what one
# token has read, the next finds in the cache. Where they name more, every neuron is computed for all, as in a chunk:
# products of tiles take so much less time for each neuron.


# Tasks of a token: a few tokens are to keep more threads than there are tokens busy.
_SLICES = 4
# All neurons are computed where the masks name as many as so many whole blocks have, and so many percent of what all
# tokens would compute: tiles read every weight once, and then take less time for each. See docs/benchmarks.md.
DENSE_BLOCKS, DENSE_PERCENT = 2, 30


def ffn_batch(function: KernelFunction, arguments: FfnArguments) -> None:
    """Declares the rest of the arguments and writes the body."""
    spec = arguments.spec
    listed = declare_list(function, arguments)
    if listed is None:
        raise ValueError("a batch of tokens is computed by masks")
    counts = function.scratch("counts", "int32", spec.rows)
    vectors = _declare_vectors(function, arguments)
    slices = Slices.declare(function, arguments, _SLICES)
    memory = ChunkMemory.declare(function, spec, arguments.bundle.scale is not None)
    tokens = function.tokens(spec.rows)

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
    limit = bind(spec.neurons * DENSE_BLOCKS + tokens * (spec.neurons * DENSE_PERCENT // 100))
    with when(total > limit):
        compute_chunk(arguments, memory, tokens)
        # Nobody counted those that fired: they are counted as fired.
        for i in range(2):
            arguments.stats[i] = arguments.stats[i] + tirx.Cast("int64", tokens * spec.neurons)
    with when(total <= limit):
        with parallel(tokens * _SLICES) as index:
            token = bind(index // _SLICES)
            quantized = None if vectors is None else QuantizedVector(*vectors, token)
            neurons = NeuronList(listed.neurons, token, bind(counts[token]), None)
            vector = Vector(arguments.x, token, quantized)
            compute_slice(arguments, vector, neurons, slices, index, index - token * _SLICES)
        slices.add_up(arguments.y, arguments.down_bias, spec.dim, tokens)
        slices.count(arguments.stats, total, tokens)


def _declare_vectors(
    function: KernelFunction, arguments: FfnArguments
) -> tuple[KernelTensor, KernelTensor, KernelTensor | None] | None:
    """Memory for the tokens' bytes, where the matrix has bytes."""
    bundle, rows = arguments.bundle, arguments.spec.rows
    if bundle.scale is None:
        return None
    count, padded = vector_sizes(bundle)
    numbers = function.scratch("vector_bytes", "int8", rows, -(-count // 64) * 64)
    scales = function.scratch("vector_scales", "float32", rows, padded)
    return numbers, scales, function.scratch("vector_offsets", "float32", rows, padded) if bundle.offset else None


# Feed-forward blocks: which kernel there is for which kind, and the arguments they have in common.


def ffn(spec: FfnSpec, function: KernelFunction) -> None:
    """Write the body of an `FfnSpec`."""
    arguments = FfnArguments.of(spec, function)
    if spec.rows == 1:
        ffn_one(function, arguments)
    elif spec.is_masked:
        ffn_batch(function, arguments)
    else:
        ffn_chunk(function, arguments)
