"""Values that are computed in the same way are known as equal, and no others."""

import pytest
import torch
from torch.fx import Graph, Node

from picompile_passes.graph.nodes import EqualValues

_aten = torch.ops.aten


@pytest.fixture
def graph() -> Graph:
    return Graph()


def test_the_same_calls_of_the_same_values(graph: Graph) -> None:
    x, y = graph.placeholder("x"), graph.placeholder("y")

    def made(of: Node, size: int = 3, dim: int = 0) -> Node:
        first = graph.call_function(_aten.unsqueeze.default, (of, dim))
        return graph.call_function(_aten.expand.default, (first, [size, -1]))

    equal = EqualValues()
    assert equal.number(made(x)) == equal.number(made(x))
    others = [made(y), made(x, size=4), made(x, dim=1), x, y, made(made(x))]
    numbers = [equal.number(node) for node in [made(x), *others]]
    assert len(set(numbers)) == len(numbers)


def test_numbers_and_values_are_told_apart(graph: Graph) -> None:
    """A number among the arguments is not the value of that number."""
    x = graph.placeholder("x")
    equal = EqualValues()
    number = equal.number(x)
    by_value = graph.call_function(_aten.add.Tensor, (x, x))
    by_number = graph.call_function(_aten.add.Tensor, (x, number))
    assert equal.number(by_value) != equal.number(by_number)
    by_keyword = graph.call_function(_aten.add.Tensor, (x, x), {"alpha": 2})
    assert equal.number(by_keyword) != equal.number(by_value)


def test_long_chains(graph: Graph) -> None:
    ends = []
    for _ in range(2):
        value = graph.placeholder("x")
        for _ in range(5000):
            value = graph.call_function(_aten.neg.default, (value,))
        ends.append(value)
    equal = EqualValues()
    assert equal.number(ends[0]) == equal.number(ends[1])
