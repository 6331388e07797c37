"""The feed-forward block of a chunk of tokens: dense, since some token needs almost every neuron."""

from dataclasses import dataclass

from picompile_codegen.build import isa
from picompile_codegen.cpu.accumulate import Reduction, accumulate_columns, column_blocks
from picompile_codegen.cpu.byte_tiles import declare_rows, quantize_rows, raw_offset, signed_offset
from picompile_codegen.cpu.ffn_neurons import FfnArguments
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.linear import TileProjection, project_rows, row_block
from picompile_codegen.cpu.quantized import QuantizedRows
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, parallel, select, when, worth_a_region
from picompile_codegen.cpu.vector import blocks, load, splat, store
from picompile_codegen.specs import FfnSpec


@dataclass(frozen=True)
class ChunkMemory:
    """What a chunk is computed in: products with gate, what goes down, and the bytes of x and of that."""

    gate: KernelTensor | None
    hidden: KernelTensor
    x_bytes: QuantizedRows | None
    down_bytes: QuantizedRows | None

    @classmethod
    def declare(cls, function: KernelFunction, spec: FfnSpec, has_bytes: bool) -> "ChunkMemory":
        """Declares it. Must come before any statement of a kernel."""
        gate = function.scratch("gate", "float32", spec.rows, spec.neurons) if spec.gated else None
        hidden = function.scratch("hidden", "float32", spec.rows, spec.neurons)
        if not has_bytes:
            return cls(gate, hidden, None, None)
        x_bytes = declare_rows(function, "x", spec.rows, spec.dim)
        down_bytes = declare_rows(function, "hidden", spec.rows, spec.neurons)
        # Without an instruction that adds up fours of bytes, float32 is faster than turning columns into bytes.
        return cls(gate, hidden, x_bytes, None if isa.current().bytes_dot == "maddubs" else down_bytes)


def ffn_chunk(function: KernelFunction, arguments: FfnArguments) -> None:
    """Write the body of a block that computes every neuron of several tokens."""
    spec = arguments.spec
    memory = ChunkMemory.declare(function, spec, arguments.bundle.scale is not None)
    compute_chunk(arguments, memory, function.tokens(spec.rows))


def compute_chunk(arguments: FfnArguments, memory: ChunkMemory, tokens: Expr) -> None:
    """y of the first `tokens` tokens, every neuron computed."""
    spec, gate, hidden = arguments.spec, memory.gate, memory.hidden
    quantized, down_bytes = memory.x_bytes, memory.down_bytes
    is_worth = worth_a_region(arguments.bundle.bytes)

    if quantized is not None:
        quantize_rows(arguments.x, tokens, spec.dim, raw_offset(arguments.bundle), quantized)
    size = row_block(arguments.bundle)
    with parallel(-(-spec.neurons // size), when_worth=is_worth) as block:
        _project(arguments, block, tokens, quantized, gate, hidden)
        with loop(0, tokens) as t:
            _activate(arguments, block, size, t, gate, hidden)
    down = Reduction(arguments.bundle, spec.neurons, arguments.down_row, hidden, arguments.down_bias, arguments.y)
    if down_bytes is not None:
        quantize_rows(hidden, tokens, spec.neurons, signed_offset(), down_bytes)
    with parallel(column_blocks(down), when_worth=is_worth) as block:
        accumulate_columns(down, block, down_bytes, tokens)


def _project(
    arguments: FfnArguments,
    block: Expr,
    tokens: Expr,
    quantized: QuantizedRows | None,
    gate: KernelTensor | None,
    hidden: KernelTensor,
) -> None:
    """The products of a block of neurons with gate and up, before their activations."""
    neurons = arguments.spec.neurons
    first, _ = arguments.first_row(0)
    projection = TileProjection(first, neurons, lambda neuron: arguments.first_row(neuron)[1], arguments.first_bias)
    project_rows(projection, block, arguments.x, quantized, tokens, hidden if gate is None else gate)
    if gate is not None:
        projection = TileProjection(arguments.bundle, neurons, arguments.up_row, arguments.up_bias)
        project_rows(projection, block, arguments.x, quantized, tokens, hidden)


def _activate(
    arguments: FfnArguments, block: Expr, size: int, t: Expr, gate: KernelTensor | None, hidden: KernelTensor
) -> None:
    """hidden = activation(gate) ∘ up_activation(hidden), or activation(hidden), for a block of neurons of one token."""
    neurons = arguments.spec.neurons

    def output(c: Expr, valid: int) -> None:
        raised = bind(load(hidden, t, c, valid=valid))
        first = raised if gate is None else bind(load(gate, t, c, valid=valid))
        value = arguments.output(first, None if gate is None else raised)
        if arguments.spec.is_exact:
            # Not a product: a silent neuron whose up is infinite must not turn into NaN.
            value = select(first > splat(arguments.spec.threshold), value, splat(0.0))
        store(hidden, t, c, value=value, valid=valid)

    full, rest = divmod(neurons, size)
    with when(block < full):
        blocks(size, lambda c, valid: output(block * size + c, valid))
    if rest:
        with when(block == full):
            blocks(rest, lambda c, valid: output(full * size + c, valid))
