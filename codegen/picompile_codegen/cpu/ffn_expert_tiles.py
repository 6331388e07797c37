"""Feed-forward blocks of experts for a chunk of a prompt: one expert after the other, as a block of its own.

The tokens that chose an expert are multiplied in tiles with its neurons, which are read once for all of them. Each
token adds its experts' outputs in their order, so that y does not depend on the number of threads.
"""

from dataclasses import dataclass, replace

from tvm import tirx

from picompile_codegen.cpu.ffn_chunk import ChunkMemory, compute_chunk
from picompile_codegen.cpu.ffn_neurons import FfnArguments
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.tensor import AddingView, Expr, KernelTensor, TensorView, bind, counter, loop, parallel, when
from picompile_codegen.cpu.token_experts import is_chosen
from picompile_codegen.cpu.vector import blocks, fma, load, splat, store
from picompile_codegen.specs import FfnSpec


@dataclass(frozen=True)
class ExpertTiles:
    """Memory for the tokens of one expert: their numbers, int32 [rows + 1], and what they are multiplied to."""

    tokens: KernelTensor
    memory: ChunkMemory

    @classmethod
    def declare(cls, function: KernelFunction, arguments: FfnArguments) -> "ExpertTiles":
        """Declare the memory. This must come before any statement of the kernel."""
        spec = arguments.spec
        numbers = function.scratch("expert_tokens", "int32", spec.rows + 1)
        return cls(numbers, ChunkMemory.declare(function, _one_expert(spec), arguments.bundle))

    def compute(self, arguments: FfnArguments, tokens: Expr) -> None:
        """Compute y of the first `tokens` tokens."""
        spec, y, down_bias, gains = arguments.spec, arguments.y, arguments.down_bias, arguments.gains
        assert gains is not None
        with parallel(tokens) as token:
            blocks(
                spec.dim,
                lambda c, valid: store(
                    y, token, c, value=splat(0.0) if down_bias is None else load(down_bias, c, valid=valid), valid=valid
                ),
            )
        with loop(0, spec.experts) as expert:
            count = counter()
            with loop(0, tokens) as token:
                # Written whether it is one of the expert's or not, and then kept or overwritten.
                self.tokens[count[0]] = token
                count[0] = count[0] + tirx.Cast("int32", is_chosen(gains, token, expert))
            found = bind(count[0])
            with when(found > 0):
                compute_chunk(self._of_expert(arguments, bind(expert)), self.memory, found)
        self._add_biases(arguments, tokens)

    def _of_expert(self, arguments: FfnArguments, expert: Expr) -> FfnArguments:
        """Return one expert as a block, whose rows are those of its tokens; what it computes is added to y."""
        first = bind(expert * arguments.spec.expert_neurons)

        def token(row: Expr) -> Expr:
            return self.tokens[row]

        def own(vector: KernelTensor | None) -> KernelTensor | None:
            return None if vector is None else TensorView(vector, column=first)

        gains, mask = arguments.gains, arguments.mask
        assert gains is not None
        return replace(
            arguments,
            spec=_one_expert(arguments.spec),
            first=first,
            x=TensorView(arguments.x, row=token),
            mask=None if mask is None else TensorView(mask, row=token, column=first),
            gains=TensorView(gains, row=token, column=expert),
            gate_bias=own(arguments.gate_bias),
            up_bias=own(arguments.up_bias),
            down_bias=None,
            gate_limits=own(arguments.gate_limits),
            output_limits=own(arguments.output_limits),
            y=AddingView(arguments.y, row=token),
        )

    def _add_biases(self, arguments: FfnArguments, tokens: Expr) -> None:
        """Add the biases of each token's experts, times their gains."""
        biases, gains, spec, y = arguments.expert_bias, arguments.gains, arguments.spec, arguments.y
        if biases is None:
            return
        assert gains is not None
        with parallel(tokens) as token, loop(0, spec.experts) as expert, when(is_chosen(gains, token, expert)):
            gain, first = bind(splat(gains[token, expert])), bind(expert * spec.dim)

            def add(c: Expr, valid: int, gain: Expr = gain, first: Expr = first, token: Expr = token) -> None:
                value = fma(gain, load(biases, first + c, valid=valid), load(y, token, c, valid=valid))
                store(y, token, c, value=value, valid=valid)

            blocks(spec.dim, add)


def _one_expert(spec: FfnSpec) -> FfnSpec:
    """Return the parameters of the block that one expert is, whose outputs are multiplied by gains all the same."""
    neurons = spec.expert_neurons
    return replace(spec, neurons=neurons, experts=0, chosen=0, expert_bias=False, down_bias=False)
