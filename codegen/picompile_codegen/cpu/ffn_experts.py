"""The experts that tokens have chosen, in a feed-forward block whose neurons are those of many experts.

A token computes the neurons of a few experts alone, by their places (`token_experts.py`).
"""

from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cpu.ffn_neurons import FfnArguments
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, counter, loop, parallel
from picompile_codegen.cpu.token_experts import TokenExperts, is_chosen
from picompile_codegen.cpu.vector import at, blocks, fma, load, splat, store, zero_vector


@dataclass(frozen=True)
class ChosenExperts:
    """The experts of each token: numbers int32 [tokens, most + 1], in order, and how many, int32 [tokens]."""

    numbers: KernelTensor
    counts: KernelTensor

    @classmethod
    def declare(cls, function: KernelFunction, arguments: FfnArguments) -> "ChosenExperts | None":
        """Declare the memory; None for a block without experts."""
        spec = arguments.spec
        if not spec.experts:
            return None
        return cls(
            function.scratch("experts", "int32", spec.rows, spec.chosen + 1),
            function.scratch("chosen", "int32", spec.rows),
        )

    def find(self, arguments: FfnArguments, token: Expr) -> None:
        """Find the experts of a token: those whose gain is not 0, or not a number."""
        spec, gains, count = arguments.spec, arguments.gains, counter()
        assert gains is not None
        with loop(0, spec.experts) as expert:
            # Written whether it is chosen or not, and then kept or overwritten.
            found = bind(count[0])
            self.numbers[token, found] = expert
            is_one = tirx.And(is_chosen(gains, token, expert), found < spec.chosen)
            count[0] = found + tirx.Cast("int32", is_one)
        self.counts[token] = count[0]

    def of(self, arguments: FfnArguments, token: Expr) -> TokenExperts:
        """Return the experts of a token, which must have been found."""
        gains, spec = arguments.gains, arguments.spec
        assert gains is not None
        return TokenExperts(gains, self.numbers, token, bind(self.counts[token]), spec.expert_neurons)

    def add_biases(self, arguments: FfnArguments, tokens: Expr) -> None:
        """Add the biases of each token's experts, times their gains, to y, where there are biases."""
        biases, y, spec = arguments.expert_bias, arguments.y, arguments.spec
        if biases is None:
            return
        with parallel(tokens, when_worth=spec.rows > 1) as token:
            experts = self.of(arguments, token)

            def add(c: Expr, valid: int) -> None:
                value = zero_vector()
                value[at(0)] = load(y, token, c, valid=valid)
                with loop(0, experts.count) as i:
                    number = bind(experts.number(i))
                    gain = splat(experts.gains[token, number])
                    value[at(0)] = fma(gain, load(biases, number * spec.dim + c, valid=valid), value[at(0)])
                store(y, token, c, value=value[at(0)], valid=valid)

            blocks(spec.dim, add)
