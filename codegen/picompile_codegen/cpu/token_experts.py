"""The neurons of the experts that a token has chosen.

The runs of neurons of these experts, one behind the other, give each neuron a place. What is kept for each neuron of a
token, such as products and lists, is kept by place.
"""

from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, counter, loop
from picompile_codegen.cpu.token_ops import order_of
from picompile_codegen.specs import ExpertsSpec, FfnSpec, PredictLowRankSpec, PredictSignsSpec

OfExperts = ExpertsSpec | FfnSpec | PredictLowRankSpec | PredictSignsSpec


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
    def declare(cls, function: KernelFunction, spec: OfExperts) -> "ChosenExperts":
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


@dataclass(frozen=True)
class ExpertTokens:
    """The tokens that chose each expert: pairs of a token and one of its experts, expert after expert.

    `tokens` and `numbers` int32 [pairs + 1] have the token of each pair, and which of the token's experts it is,
    counted from 0. `experts` and `starts` int32 [experts + 1] have the number of each expert that is in any, and its
    first pair; behind the last one is that where pairs end.
    """

    tokens: KernelTensor
    numbers: KernelTensor
    experts: KernelTensor
    starts: KernelTensor
    places: KernelTensor

    @classmethod
    def declare(cls, function: KernelFunction, spec: OfExperts) -> "ExpertTokens":
        """Declare the memory for the rows of a kernel of experts."""
        pairs = spec.rows * spec.chosen
        return cls(
            function.scratch("pair_tokens", "int32", pairs + 1),
            function.scratch("pair_numbers", "int32", pairs + 1),
            function.scratch("used_experts", "int32", spec.experts + 1),
            function.scratch("used_starts", "int32", spec.experts + 1),
            function.scratch("pair_places", "int32", spec.experts),
        )

    def gather(self, chosen: ChosenExperts, tokens: Expr) -> Expr:
        """Gather the pairs of the first `tokens` tokens, whose experts are known. Return how many experts they have."""
        used, start = counter(), counter()
        with loop(0, chosen.experts) as expert:
            self.places[expert] = 0
        with loop(0, tokens) as token, loop(0, chosen.counts[token]) as number:
            expert = bind(chosen.numbers[token, number])
            self.places[expert] = self.places[expert] + 1
        with loop(0, chosen.experts) as expert:
            count, first = bind(self.places[expert]), bind(start[0])
            # Written whether any token has chosen it or not, and then kept or overwritten.
            self.experts[used[0]] = expert
            self.starts[used[0]] = first
            self.places[expert] = first
            used[0] = used[0] + tirx.Cast("int32", count > 0)
            start[0] = first + count
        self.starts[used[0]] = start[0]
        with loop(0, tokens) as token, loop(0, chosen.counts[token]) as number:
            expert = bind(chosen.numbers[token, number])
            place = bind(self.places[expert])
            self.tokens[place] = token
            self.numbers[place] = number
            self.places[expert] = place + 1
        return bind(used[0])
