"""Feed-forward blocks: of one token, of several sequences' next tokens, and of a chunk of a prompt.

The kernel for one token has three steps:
1. List the indices of the neurons to compute, in order (`ffn_neurons.py`): in `exact` by each neuron's product with the
   gating matrix, which is above a threshold or, activated, above the neuron's limit; in `masked` by the mask.
2. Cut the list into SLICES equal runs (`ffn_slices.py`), each with a partial y.
3. Add up the partial y in order.
The number of slices is fixed, and so is the order of all additions: every bit of y is the same for any number of
threads.

For several sequences, each token computes its own neurons as above, to the same bits: rows that one token read are in
the CPU's cache for the next, and many tokens share the work on the gate and up of a neuron (`ffn_outputs.py`). Where
every neuron is computed, a few tokens share the work on each weight.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.backend import body
from picompile_codegen.cpu.accumulate import Reduction, ReductionInputs, accumulate
from picompile_codegen.cpu.dot import biased, prepare_vector
from picompile_codegen.cpu.ffn_neurons import (
    FfnArguments,
    ListMemory,
    NeuronList,
    compare_with_limit,
    declare_list,
    list_neurons,
    make_list,
)
from picompile_codegen.cpu.ffn_outputs import FEW_TOKENS, TokenLists, TokenOutputs
from picompile_codegen.cpu.ffn_slices import Slices, compute_dense_slice, compute_slice
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.linear import ChunkInputs, TileProjection, project_rows
from picompile_codegen.cpu.matrix import KernelMatrix
from picompile_codegen.cpu.panels import import_functions
from picompile_codegen.cpu.tensor import (
    Expr,
    KernelTensor,
    bind,
    counter,
    loop,
    minimum,
    parallel,
    select,
    when,
    worth_a_region,
)
from picompile_codegen.cpu.token_ops import sum_row
from picompile_codegen.cpu.token_vectors import TokenVectors, multiply_rows
from picompile_codegen.cpu.vector import LANES, activate, blocks, load, splat, store
from picompile_codegen.errors import CodegenError
from picompile_codegen.specs import CountedFfnSpec, FfnSpec

# The number of slices. Each has a partial y, and adding these takes time; with too few slices, threads are idle.
SLICES = 16


def ffn_one(function: KernelFunction, arguments: FfnArguments) -> None:
    """Write the body of a block for one token, and declare its scratch memory."""
    spec = arguments.spec
    memory = declare_list(function, arguments)
    slices = Slices.declare(function, arguments, SLICES)

    vector = prepare_vector(arguments.x, arguments.bundle)
    is_worth = worth_a_region(arguments.bundle.bytes)
    listed = None if memory is None else make_list(arguments, vector, memory)
    with parallel(SLICES, when_worth=is_worth) as index:
        compute_slice(arguments, vector, listed, slices, index, number=index)
    slices.add_up(arguments.y, arguments.down_bias, spec.dim, 1)
    slices.add_up_squares(arguments.y, spec.dim, 1)
    slices.count(arguments.stats, spec.neurons if listed is None else listed.count, 1)


# Tokens that a task of a dense block computes: as many as share what it reads, and few enough to have tasks for all
# threads.
_TASK_TOKENS = 16


def ffn_rowwise(function: KernelFunction, arguments: FfnArguments) -> None:
    """Write the body of a block for one token each of several sequences, and declare its scratch memory."""
    spec = arguments.spec
    listed = declare_list(function, arguments)
    counts = None if listed is None else function.scratch("counts", "int32", spec.rows)
    outputs = None if listed is None else TokenOutputs.declare(function, arguments)
    vectors = TokenVectors.declare(function, "vector", arguments.x, spec.rows, arguments.bundle)
    slices = Slices.declare(function, arguments, SLICES)
    tokens = function.tokens(spec.rows)

    vectors.prepare(tokens)
    if listed is None or counts is None:
        compute = _compute_above_limits if spec.has_limits else _compute_all
        compute(arguments, vectors, slices, tokens)
        computed = tokens * spec.neurons
    else:
        _compute_listed(arguments, vectors, listed, counts, outputs, slices, tokens)
        total = counter()
        with loop(0, tokens) as token:
            total[0] = total[0] + counts[token]
        computed = bind(total[0])
    slices.add_up(arguments.y, arguments.down_bias, spec.dim, tokens)
    slices.add_up_squares(arguments.y, spec.dim, tokens)
    slices.count(arguments.stats, computed, tokens)


def _compute_all(arguments: FfnArguments, vectors: TokenVectors, slices: Slices, tokens: Expr) -> None:
    """Compute every neuron of each token; a task takes a slice of the neurons, for several tokens."""
    with parallel((tokens + (_TASK_TOKENS - 1)) // _TASK_TOKENS * SLICES) as index:
        group = bind(index // SLICES)
        first = bind(group * _TASK_TOKENS)
        stop = bind(minimum(first + _TASK_TOKENS, tokens))
        compute_dense_slice(arguments, vectors, first, stop, slices, number=bind(index - group * SLICES))


def _compute_above_limits(arguments: FfnArguments, vectors: TokenVectors, slices: Slices, tokens: Expr) -> None:
    """Compute every neuron of each token by itself: each adds rows of down in the groups that it has alone."""
    _compute_by_token(arguments, vectors, slices, tokens, neurons_of=lambda _: None)


def _compute_by_token(
    arguments: FfnArguments,
    vectors: TokenVectors,
    slices: Slices,
    tokens: Expr,
    neurons_of: Callable[[Expr], NeuronList | None],
) -> None:
    """Compute `neurons_of(token)` of each token, or every neuron where that is None.

    A slice of one token is followed by the same slice of the next, which finds its neurons' rows in the cache.
    """
    with parallel(tokens * SLICES) as index:
        number = bind(index // tokens)
        token = bind(index - number * tokens)
        listed = neurons_of(token)
        compute_slice(
            arguments,
            vector=vectors[token],
            listed=listed,
            slices=slices,
            index=bind(token * SLICES + number),
            number=number,
        )


def _compute_listed(
    arguments: FfnArguments,
    vectors: TokenVectors,
    listed: ListMemory,
    counts: KernelTensor,
    outputs: TokenOutputs | None,
    slices: Slices,
    tokens: Expr,
) -> None:
    """List each token's own neurons, and compute those."""
    products = listed.products
    if products is not None:

        def store(token: Expr, neuron: Expr, product: Expr) -> None:
            products[token, neuron] = biased(product, arguments.first_bias, neuron)
            compare_with_limit(arguments, listed, token, neuron)

        matrix = arguments.first_matrix
        multiply_rows(
            matrix, row_of=arguments.first_row, count=arguments.spec.neurons, vectors=vectors, tokens=tokens, emit=store
        )
    with parallel(tokens) as token:
        counts[token] = list_neurons(arguments, listed, token).count

    def compute_slices(known: KernelTensor | None) -> None:
        def neurons_of(token: Expr) -> NeuronList:
            return NeuronList(listed.neurons, row=token, count=bind(counts[token]), products=products, outputs=known)

        _compute_by_token(arguments, vectors, slices, tokens, neurons_of)

    if outputs is None:
        compute_slices(None)
        return
    with when(tokens > FEW_TOKENS):
        outputs.compute(arguments, TokenLists(tokens, listed.neurons, counts, products), vectors)
        compute_slices(outputs.outputs)
    with when(tokens <= FEW_TOKENS):
        compute_slices(None)


@body(CountedFfnSpec, FfnSpec)
def ffn(spec: FfnSpec, function: KernelFunction) -> None:
    """Write the body of an `FfnSpec`.

    Raises:
        CodegenError: For one that takes the number of its neurons as an argument, unless it computes those of a mask.
    """
    if isinstance(spec, CountedFfnSpec) and not (spec.is_masked and not spec.in_tiles):
        raise CodegenError(f"there is no CPU kernel for {type(spec).__name__} of kind {spec.kind}")
    arguments = FfnArguments.of(spec, function, KernelMatrix)
    if spec.rows == 1:
        ffn_one(function, arguments)
    elif (spec.is_masked and not spec.in_tiles) or spec.rowwise:
        ffn_rowwise(function, arguments)
    else:
        ffn_chunk(function, arguments)


# A chunk is dense, since some token needs almost every neuron.


@dataclass(frozen=True)
class ChunkMemory:
    """Memory for a chunk: products with gate, hidden values, and x and the hidden values as they are multiplied."""

    gate: KernelTensor | None
    hidden: KernelTensor
    inputs: ChunkInputs
    packed_hidden: ReductionInputs

    @classmethod
    def declare(cls, function: KernelFunction, spec: FfnSpec, bundle: KernelMatrix) -> "ChunkMemory":
        """Declare the memory. This must come before any statement of the kernel."""
        return cls(
            gate=function.scratch("gate", "float32", spec.rows, spec.neurons) if spec.gated else None,
            hidden=function.scratch("hidden", "float32", spec.rows, spec.neurons),
            inputs=ChunkInputs.declare(function, "x", spec.rows, spec.dim, bundle),
            packed_hidden=ReductionInputs.declare(function, "hidden", spec.rows, spec.neurons, bundle),
        )


def ffn_chunk(function: KernelFunction, arguments: FfnArguments) -> None:
    """Write the body of a block that computes every neuron of several tokens."""
    spec = arguments.spec
    memory = ChunkMemory.declare(function, spec, arguments.bundle)
    import_functions(function)
    compute_chunk(arguments, memory, function.tokens(spec.rows))


def compute_chunk(arguments: FfnArguments, memory: ChunkMemory, tokens: Expr) -> None:
    """Compute y of the first `tokens` tokens over all neurons."""
    spec, hidden = arguments.spec, memory.hidden
    is_worth = worth_a_region(arguments.bundle.bytes)
    memory.inputs.pack(arguments.x, tokens, spec.dim)
    first = TileProjection(arguments.first_matrix, spec.neurons, arguments.first_row, arguments.first_bias)
    up = TileProjection(arguments.bundle, spec.neurons, arguments.up_row, arguments.up_bias)
    with parallel(first.tasks, when_worth=is_worth) as task:
        project_rows(first, task, x=memory.inputs, tokens=tokens, out=hidden if memory.gate is None else memory.gate)
        if memory.gate is not None:
            project_rows(up, task, x=memory.inputs, tokens=tokens, out=hidden)
        with loop(0, tokens) as t:
            _activate(arguments, block=task, size=first.tile.outputs, t=t, gate=memory.gate, hidden=hidden)
    memory.packed_hidden.pack(hidden, tokens, spec.neurons)
    down = Reduction(
        arguments.bundle, count=spec.neurons, row_of=arguments.down_row, bias=arguments.down_bias, y=arguments.y
    )
    accumulate(down, memory.packed_hidden, tokens, when_worth=is_worth)
    if spec.squares:
        with parallel(tokens, when_worth=is_worth) as t:
            arguments.y[t, spec.dim] = sum_row(
                hidden, token=t, start=0, width=spec.neurons, term=lambda value: value * value
            )


def _activate(
    arguments: FfnArguments, block: Expr, size: int, t: Expr, gate: KernelTensor | None, hidden: KernelTensor
) -> None:
    """hidden = activation(gate) ∘ up_activation(hidden), or activation(hidden), for a block of neurons of one token."""
    spec = arguments.spec

    def output(c: Expr, valid: int) -> None:
        raised = bind(load(hidden, t, c, valid=valid))
        first = raised if gate is None else bind(load(gate, t, c, valid=valid))
        value = arguments.output(first, None if gate is None else raised)
        # Not a product: a silent neuron whose up is infinite must not turn into NaN.
        if spec.is_exact and spec.is_sparse:
            value = select(first > splat(spec.threshold), value, splat(0.0))
        if arguments.gate_limits is not None:
            activated = bind(tirx.abs(activate(spec.activation, first)))
            value = select(activated > load(arguments.gate_limits, c, valid=valid), value, splat(0.0))
        if arguments.output_limits is not None:
            value = bind(value)
            value = select(tirx.abs(value) <= load(arguments.output_limits, c, valid=valid), splat(0.0), value)
        if arguments.mask is not None:
            value = select(_named(arguments, arguments.mask, t, first=c, valid=valid) > splat(0.0), value, splat(0.0))
        store(hidden, t, c, value=value, valid=valid)

    full, rest = divmod(spec.neurons, size)
    with when(block < full):
        blocks(size, lambda c, valid: output(block * size + c, valid))
    if rest:
        with when(block == full):
            blocks(rest, lambda c, valid: output(full * size + c, valid))


def _named(arguments: FfnArguments, mask: KernelTensor, t: Expr, first: Expr, valid: int) -> Expr:
    """Return the mask of token t for neurons `first` …, float32x8: 1 for those that it names."""
    if arguments.table is None:
        return load(mask, t, first, valid=valid)
    columns = [arguments.table[first + i] for i in range(valid)]
    values = [tirx.Cast("float32", mask[t, column]) for column in columns]
    return tirx.Shuffle(values + [tirx.FloatImm("float32", 0.0)] * (LANES - valid), list(range(LANES)))
