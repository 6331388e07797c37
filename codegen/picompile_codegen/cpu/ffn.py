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

In a block of experts, a token has the neurons of the experts that it has chosen, and all of this is about these
(`token_experts.py`). Several tokens share the work on the gates of an expert. In a chunk, neurons that may be silent
are computed as in decoding, and the others with the tokens of an expert in tiles (`ffn_expert_tiles.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from tvm import tirx

from picompile_codegen.backend import body
from picompile_codegen.cpu.dot import biased, prepare_vector
from picompile_codegen.cpu.ffn_chunk import ffn_chunk
from picompile_codegen.cpu.ffn_expert_tiles import ExpertTiles
from picompile_codegen.cpu.ffn_experts import add_expert_biases
from picompile_codegen.cpu.ffn_neurons import (
    FfnArguments,
    ListMemory,
    NeuronList,
    compare_with_limit,
    decide,
    declare_list,
    list_neurons,
    make_list,
)
from picompile_codegen.cpu.ffn_outputs import FEW_TOKENS, TokenLists, TokenOutputs
from picompile_codegen.cpu.ffn_slices import Slices, compute_dense_slice, compute_slice
from picompile_codegen.cpu.kernel import KernelFunction
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
    when,
    worth_a_region,
)
from picompile_codegen.cpu.token_experts import ChosenExperts, ExpertTokens, TokenExperts
from picompile_codegen.cpu.token_vectors import TokenVectors, each_exact_tile, multiply_rows
from picompile_codegen.errors import CodegenError
from picompile_codegen.specs import CountedFfnSpec, FfnSpec

# The number of slices. Each has a partial y, and adding these takes time; with too few slices, threads are idle.
SLICES = 16


def ffn_one(function: KernelFunction, arguments: FfnArguments) -> None:
    """Write the body of a block for one token, and declare its scratch memory."""
    spec = arguments.spec
    chosen = ChosenExperts.declare(function, spec) if spec.experts else None
    memory = declare_list(function, arguments)
    slices = Slices.declare(function, arguments, SLICES)

    experts, gains = None, arguments.gains
    if chosen is not None and gains is not None:
        chosen.find(gains, 0)
        experts = chosen.of(gains, 0)
    vector = prepare_vector(arguments.x, arguments.bundle)
    is_worth = worth_a_region(arguments.bundle.bytes)
    listed = None if memory is None else make_list(arguments, vector, memory, experts)
    with parallel(SLICES, when_worth=is_worth) as index:
        compute_slice(arguments, vector, listed, slices, index, number=index, experts=experts)
    slices.add_up(arguments.y, arguments.down_bias, spec.dim, 1)
    slices.add_up_squares(arguments.y, spec.dim, 1)
    if chosen is not None:
        add_expert_biases(arguments, chosen, 1)
    every = spec.neurons if experts is None else experts.neurons
    slices.count(arguments.stats, every if listed is None else listed.count, 1)


# Tokens that a task of a dense block computes: as many as share what it reads, and few enough to have tasks for all
# threads.
_TASK_TOKENS = 16


@dataclass(frozen=True)
class RowwiseMemory:
    """Memory for tokens that compute neurons of their own: their lists, how long these are, and what they give."""

    chosen: ChosenExperts | None
    shared: ExpertTokens | None
    listed: ListMemory | None
    counts: KernelTensor | None
    outputs: TokenOutputs | None
    vectors: TokenVectors
    slices: Slices

    @classmethod
    def declare(cls, function: KernelFunction, arguments: FfnArguments, by_gate: bool = False) -> "RowwiseMemory":
        """Declare the memory for the rows of `arguments.spec`. This must come before any statement of the kernel.

        With `by_gate`, gates decide which neurons are computed, whatever the kind.
        """
        spec, listed = arguments.spec, declare_list(function, arguments, by_gate)
        rows, of_gates = spec.rows, listed is not None and listed.products is not None
        return cls(
            chosen=ChosenExperts.declare(function, spec) if spec.experts else None,
            shared=ExpertTokens.declare(function, spec) if spec.experts and of_gates else None,
            listed=listed,
            counts=None if listed is None else function.scratch("counts", "int32", rows),
            outputs=None if listed is None else TokenOutputs.declare(function, arguments),
            vectors=TokenVectors.declare(function, "vector", arguments.x, rows, arguments.bundle),
            slices=Slices.declare(function, arguments, SLICES),
        )

    def experts(self, arguments: FfnArguments, token: Expr) -> TokenExperts | None:
        """Return the experts of a token, which must have been found; None for a block without experts."""
        gains = arguments.gains
        return None if self.chosen is None or gains is None else self.chosen.of(gains, token)


def ffn_rowwise(function: KernelFunction, arguments: FfnArguments) -> None:
    """Write the body of a block for one token each of several sequences, and declare its scratch memory."""
    memory = RowwiseMemory.declare(function, arguments)
    tokens = function.tokens(arguments.spec.rows)
    memory.slices.count(arguments.stats, compute_rows(arguments, memory, tokens), tokens)


def compute_rows(arguments: FfnArguments, memory: RowwiseMemory, tokens: Expr) -> Expr:
    """Compute y of the first `tokens` rows, each with its own neurons. Return how many neurons were computed."""
    spec, chosen, slices, gains = arguments.spec, memory.chosen, memory.slices, arguments.gains
    if chosen is not None and gains is not None:
        with parallel(tokens) as token:
            chosen.find(gains, token)
    memory.vectors.prepare(tokens)
    counts = memory.counts
    if memory.listed is None or counts is None:
        compute = _compute_above_limits if spec.has_limits or spec.experts else _compute_all
        compute(arguments, memory, tokens)
        counts, each = (None, spec.neurons) if chosen is None else (chosen.counts, spec.expert_neurons)
    else:
        _compute_listed(arguments, memory, memory.listed, counts, tokens)
        each = 1
    if counts is None:
        computed = tokens * each
    else:
        total = counter()
        with loop(0, tokens) as token:
            total[0] = total[0] + counts[token]
        computed = bind(total[0]) * each
    slices.add_up(arguments.y, arguments.down_bias, spec.dim, tokens)
    slices.add_up_squares(arguments.y, spec.dim, tokens)
    if chosen is not None:
        add_expert_biases(arguments, chosen, tokens)
    return computed


# Tokens of a chunk that are computed together, which have memory for all of their neurons.
_CHUNK_TOKENS = 32


def ffn_chunk_of_experts(function: KernelFunction, arguments: FfnArguments) -> None:
    """Write the body of a block of experts for a chunk, and declare its scratch memory.

    Where most neurons may be silent, tokens compute their own, as in decoding: the gates of an expert are multiplied
    with all of its tokens, and the other rows are read for neurons that fire. Else the tokens of an expert are
    multiplied in tiles, however few they are. Either way a token has the same bits in every chunk.
    """
    spec = arguments.spec
    if not (spec.is_sparse and TokenVectors.has_bytes(arguments.bundle)):
        tiles = ExpertTiles.declare(function, arguments)
        import_functions(function)
        tiles.compute(arguments, function.tokens(spec.rows))
        return
    together = min(spec.rows, _CHUNK_TOKENS)
    few = replace(arguments, spec=replace(spec, rows=together))
    memory = RowwiseMemory.declare(function, few, by_gate=True)
    tokens = function.tokens(spec.rows)
    with loop(0, (tokens + (together - 1)) // together) as part:
        first = bind(part * together)
        rows = few.from_row(first)
        of_rows = replace(memory, vectors=replace(memory.vectors, x=rows.x))
        compute_rows(rows, of_rows, bind(minimum(tokens - first, together)))


def _compute_all(arguments: FfnArguments, memory: RowwiseMemory, tokens: Expr) -> None:
    """Compute every neuron of each token; a task takes a slice of the neurons, for several tokens."""
    with parallel((tokens + (_TASK_TOKENS - 1)) // _TASK_TOKENS * SLICES) as index:
        group = bind(index // SLICES)
        first = bind(group * _TASK_TOKENS)
        stop = bind(minimum(first + _TASK_TOKENS, tokens))
        number = bind(index - group * SLICES)
        compute_dense_slice(arguments, memory.vectors, first, stop, memory.slices, number=number)


def _compute_above_limits(arguments: FfnArguments, memory: RowwiseMemory, tokens: Expr) -> None:
    """Compute every neuron of each token, or of its experts, by itself: each adds rows of down in the groups that it
    has alone."""
    _compute_by_token(arguments, memory, tokens, neurons_of=lambda _: None)


def _compute_by_token(
    arguments: FfnArguments,
    memory: RowwiseMemory,
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
            vector=memory.vectors[token],
            listed=listed,
            slices=memory.slices,
            index=bind(token * SLICES + number),
            number=number,
            experts=memory.experts(arguments, token),
        )


def _compute_listed(
    arguments: FfnArguments, memory: RowwiseMemory, listed: ListMemory, counts: KernelTensor, tokens: Expr
) -> None:
    """List each token's own neurons, and compute those."""
    products, vectors, outputs = listed.products, memory.vectors, memory.outputs
    if products is not None and memory.chosen is not None and memory.shared is not None:
        _decide_rows(arguments, memory.vectors, listed, memory.shared, memory.shared.gather(memory.chosen, tokens))
    elif products is not None:

        def store(token: Expr, neuron: Expr, product: Expr) -> None:
            products[token, neuron] = biased(product, arguments.first_bias, neuron)
            compare_with_limit(arguments, listed, token, neuron)

        matrix = arguments.first_matrix
        multiply_rows(
            matrix, row_of=arguments.first_row, count=arguments.spec.neurons, vectors=vectors, tokens=tokens, emit=store
        )
    with parallel(tokens) as token:
        counts[token] = list_neurons(arguments, listed, token, memory.experts(arguments, token)).count

    def compute_slices(known: KernelTensor | None) -> None:
        def neurons_of(token: Expr) -> NeuronList:
            return NeuronList(listed.places, row=token, count=bind(counts[token]), products=products, outputs=known)

        _compute_by_token(arguments, memory, tokens, neurons_of)

    if outputs is None:
        compute_slices(None)
        return
    with when(tokens > FEW_TOKENS):
        outputs.compute(arguments, TokenLists(tokens, listed.places, counts, products), vectors)
        compute_slices(outputs.outputs)
    with when(tokens <= FEW_TOKENS):
        compute_slices(None)


# Neurons of an expert that a task multiplies with all of its tokens: their rows stay in the first-level cache.
_DECIDED = 16


def _decide_rows(
    arguments: FfnArguments, vectors: TokenVectors, listed: ListMemory, shared: ExpertTokens, used: Expr
) -> None:
    """Multiply the gates of the `used` experts, each row once for all tokens that have chosen its expert."""
    size, matrix = arguments.spec.expert_neurons, arguments.first_matrix
    # Experts differ in their tokens: threads that begin with equal runs of tasks have equal work.
    with parallel(used * -(-size // _DECIDED)) as task:
        # TVM knows no sign of `used`.
        part = bind(tirx.truncdiv(task, used))
        number = bind(task - part * used)
        start, first = bind(shared.starts[number]), bind(shared.experts[number] * size)
        begin = bind(part * _DECIDED)
        end = bind(minimum(begin + _DECIDED, size))

        def multiply(places: list[Expr]) -> None:
            pairs = [bind(start + place) for place in places]
            tokens = [bind(shared.tokens[pair]) for pair in pairs]
            places_of = [bind(shared.numbers[pair] * size) for pair in pairs]
            inputs = [vectors[token] for token in tokens]
            with loop(begin, end) as i:
                neuron = bind(first + i)
                ahead = bind(first + minimum(i + matrix.rows_ahead, size - 1))
                products = arguments.first_products(neuron, inputs, ahead)
                for token, place, product in zip(tokens, places_of, products, strict=True):
                    decide(arguments, listed, token, (place + i, neuron), product)

        each_exact_tile(bind(shared.starts[number + 1] - start), multiply)


@body(CountedFfnSpec, FfnSpec)
def ffn(spec: FfnSpec, function: KernelFunction) -> None:
    """Write the body of an `FfnSpec`.

    Raises:
        CodegenError: For one that takes the number of its neurons as an argument, unless it computes those of a mask.
    """
    if isinstance(spec, CountedFfnSpec) and not (spec.is_masked and not spec.in_tiles):
        raise CodegenError(f"there is no CPU kernel for {type(spec).__name__} of kind {spec.kind}")
    if spec.experts and (isinstance(spec, CountedFfnSpec) or spec.mask_columns is not None or spec.squares):
        raise CodegenError("there is no CPU kernel for a part of a block of experts, or one that normalizes neurons")
    arguments = FfnArguments.of(spec, function, KernelMatrix)
    if spec.rows == 1:
        ffn_one(function, arguments)
    elif spec.experts and not spec.rowwise and not (spec.is_masked and not spec.in_tiles):
        ffn_chunk_of_experts(function, arguments)
    elif (spec.is_masked and not spec.in_tiles) or spec.rowwise:
        ffn_rowwise(function, arguments)
    else:
        ffn_chunk(function, arguments)
