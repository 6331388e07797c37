"""Feed-forward blocks of a chunk of a prompt, whose tokens are multiplied in tiles.

A chunk is dense, since some token needs almost every neuron.
"""

from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cpu.accumulate import Reduction, ReductionInputs, accumulate
from picompile_codegen.cpu.ffn_neurons import FfnArguments
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.linear import ChunkInputs, TileProjection, project_rows
from picompile_codegen.cpu.matrix import KernelMatrix
from picompile_codegen.cpu.panels import import_functions
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, parallel, select, when, worth_a_region
from picompile_codegen.cpu.token_ops import sum_row
from picompile_codegen.cpu.vector import LANES, activate, blocks, load, splat, store
from picompile_codegen.specs import FfnSpec


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
    """hidden = activation(gate) ∘ up_activation(hidden), or activation(hidden), for a block of neurons of one token.

    `gains` of the arguments, if there are any, have one column.
    """
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
        if arguments.gains is not None:
            value = value * splat(arguments.gains[t, 0])
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
