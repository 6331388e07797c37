"""The neurons of the experts that a token has chosen.

The runs of neurons of these experts, one behind the other, give each neuron a place. What is kept for each neuron of a
token, such as products and lists, is kept by place.
"""

from dataclasses import dataclass

from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind
from picompile_codegen.cpu.token_ops import order_of


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
