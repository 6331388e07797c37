"""Values that are computed in the same way are known as equal, and no others."""

import torch
from torch.fx import Graph, Node

from picompile_passes.graph.nodes import EqualValues

_aten = torch.ops.aten


def test_the_same_calls_of_the_same_values() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")

    def made(of: Node, size: int = 3, dim: int = 0) -> Node:
        first = graph.call_function(_aten.unsqueeze.default, (of, dim))
        return graph.call_function(_aten.expand.default, (first, [size, -1]))

    equal = EqualValues()
    assert equal.number(made(x)) == equal.number(made(x))
    others = [made(y), made(x, size=4), made(x, dim=1), x, y, made(made(x))]
    numbers = [equal.number(node) for node in [made(x), *others]]
    assert len(set(numbers)) == len(numbers)


def test_numbers_and_values_are_told_apart() -> None:
    """A number among the arguments is not the value of that number."""
    graph, equal = Graph(), EqualValues()
    x = graph.placeholder("x")
    arguments = [((x, x), {}), ((x, equal.number(x)), {}), ((x, x), {"alpha": 2})]
    made = [graph.call_function(_aten.add.Tensor, args, kwargs) for args, kwargs in arguments]
    assert len({equal.number(node) for node in made}) == 3


def test_long_chains() -> None:
    graph, equal = Graph(), EqualValues()
    first = second = graph.placeholder("x")
    for _ in range(2000):
        first, second = (graph.call_function(_aten.neg.default, (value,)) for value in (first, second))
    assert equal.number(first) == equal.number(second)
