"""The neurons of the experts that a token has chosen.

The runs of neurons of these experts, one behind the other, give each neuron a place. What is kept for each neuron of a
token, such as products and lists, is kept by place.
"""

from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, counter, loop
from picompile_codegen.cpu.token_ops import order_of
from picompile_codegen.specs import FfnSpec, PredictLowRankSpec, PredictSignsSpec

OfExperts = FfnSpec | PredictLowRankSpec | PredictSignsSpec


def is_chosen(gains: KernelTensor, token: Expr, expert: Expr) -> Expr:
    """Return whether a token's gain of an expert is not 0.

    A gain that is no number counts, so that it shows: no comparison of floats says of NaN that it is not 0.
    """
    return order_of(gains[token, expert]) != 0


@dataclass(frozen=True)
class TokenExperts:
    """The `count` experts of token `token`, in the order of their numbers, of `neurons_each` neurons."""

    gains: KernelTensor
    numbers: KernelTensor
    token: Expr
    count: Expr
    neurons_each: int

    @property
    def neurons(self) -> Expr:
        """The number of their neurons."""
        return self.count * self.neurons_each

    def number(self, i: Expr) -> Expr:
        """The number of the token's i-th expert."""
        return self.numbers[self.token, i]

    def first_neuron(self, i: Expr) -> Expr:
        """The first neuron of the token's i-th expert."""
        return self.number(i) * self.neurons_each

    def neuron(self, place: Expr) -> Expr:
        """The number of a neuron by its place."""
        i = bind(place // self.neurons_each)
        return self.first_neuron(i) + (place - i * self.neurons_each)

    def gain(self, place: Expr) -> Expr:
        """The gain of a neuron by its place."""
        return bind(self.gains[self.token, self.number(place // self.neurons_each)])


@dataclass(frozen=True)
class ChosenExperts:
    """The experts of each token: numbers int32 [tokens, most + 1], in order, and how many, int32 [tokens].

    There are `experts`, of `neurons_each` neurons, of which a token has chosen `chosen` at most.
    """

    numbers: KernelTensor
    counts: KernelTensor
    experts: int
    chosen: int
    neurons_each: int

    @classmethod
    def declare(
        cls, function: KernelFunction, spec: FfnSpec | PredictLowRankSpec | PredictSignsSpec
    ) -> "ChosenExperts":
        """Declare the memory for a kernel of experts."""
        return cls(
            function.scratch("experts", "int32", spec.rows, spec.chosen + 1),
            function.scratch("chosen", "int32", spec.rows),
            spec.experts,
            spec.chosen,
            spec.neurons // spec.experts,
        )

    def find(self, gains: KernelTensor, token: Expr) -> None:
        """Find the experts of a token: those whose gain is not 0, or not a number."""
        count = counter()
        with loop(0, self.experts) as expert:
            # Written whether it is chosen or not, and then kept or overwritten.
            found = bind(count[0])
            self.numbers[token, found] = expert
            is_one = tirx.And(is_chosen(gains, token, expert), found < self.chosen)
            count[0] = found + tirx.Cast("int32", is_one)
        self.counts[token] = count[0]

    def of(self, gains: KernelTensor, token: Expr) -> TokenExperts:
        """Return the experts of a token, which must have been found."""
        return TokenExperts(gains, self.numbers, token, bind(self.counts[token]), self.neurons_each)
