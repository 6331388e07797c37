import operator

import pytest
import torch
from torch.fx import Node

from helpers.raising import HIDDEN, Write, aten, bounded, captured, only, operators, raised
from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.graph.nodes import calls
from picompile_passes.graph.operands import EMBEDDING, LINEAR, TRANSPOSE
from picompile_passes.passes.canonicalize.raise_linear import RaiseLinear


def _weight(b: GraphBuilder, *shape: int) -> Node:
    return b.parameter("w", *(shape or (40, HIDDEN)))


def _bias(b: GraphBuilder) -> Node:
    return b.parameter("b", 40)


def _permuted(b: GraphBuilder) -> Node:
    return b.call(aten.permute.default, _weight(b), [1, 0])


_FORMS: dict[str, tuple[Write, bool]] = {
    "linear": (lambda b, x: b.call(aten.linear.default, x, _weight(b)), False),
    "linear and bias": (lambda b, x: b.call(aten.linear.default, x, _weight(b), _bias(b)), True),
    "matmul of permuted": (lambda b, x: b.call(aten.matmul.default, x, _permuted(b)), False),
    "mm of t": (lambda b, x: b.call(aten.mm.default, x, b.call(aten.t.default, _weight(b))), False),
    "mm of transposed": (
        lambda b, x: b.call(aten.mm.default, x, b.call(aten.transpose.int, _weight(b), -1, -2)),
        False,
    ),
    "addmm": (lambda b, x: b.call(aten.addmm.default, _bias(b), x, _permuted(b)), True),
    "product plus bias": (
        lambda b, x: b.call(aten.add.Tensor, b.call(aten.matmul.default, x, _permuted(b)), _bias(b)),
        True,
    ),
    "bias plus product": (
        lambda b, x: b.call(aten.add.Tensor, _bias(b), b.call(aten.matmul.default, x, _permuted(b))),
        True,
    ),
    "mm of mT": (lambda b, x: b.call(aten.mm.default, x, b.call(aten.mT.default, _weight(b))), False),
    "bias of more dimensions": (
        lambda b, x: b.call(aten.addmm.default, b.call(aten.unsqueeze.default, _bias(b), 0), x, _permuted(b)),
        True,
    ),
    "bias behind a view": (
        lambda b, x: b.call(
            aten.add.Tensor,
            b.call(aten.unsqueeze.default, b.call(aten.mm.default, x, _permuted(b)), 0),
            b.call(aten.view.default, _bias(b), [1, 1, 40]),
        ),
        True,
    ),
    "batched": (
        lambda b, x: b.call(aten.matmul.default, b.call(aten.unsqueeze.default, x, 0), _permuted(b)),
        False,
    ),
}


@pytest.mark.parametrize("form", _FORMS)
def test_every_product_becomes_linear(form: str) -> None:
    write, has_bias = _FORMS[form]
    result = raised(captured(write), RaiseLinear())
    _, weight, bias = only(result, LINEAR).args
    assert weight.target == "w"
    assert (bias is not None and bias.target == "b") == has_bias
    assert operators(result).keys() <= {"linear", "unsqueeze"}


def test_a_product_that_others_use_keeps_its_bias_apart() -> None:
    """And a weight that is stored the other way is transposed."""

    def write(b: GraphBuilder, x: Node) -> Node:
        product = b.call(aten.mm.default, x, _weight(b, HIDDEN, 40))
        return b.call(aten.mul.Tensor, b.call(aten.add.Tensor, product, _bias(b)), product)

    result = raised(captured(write), RaiseLinear())
    _, weight, bias = only(result, LINEAR).args
    assert bias is None
    assert weight is only(result, TRANSPOSE)
    assert weight.meta["val"].shape == (40, HIDDEN)
    assert operators(result) == {"transpose": 1, "linear": 1, "add": 1, "mul": 1}


def test_a_table_lookup_becomes_embedding() -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        ids = b.call(aten.add.Tensor, b.positions, 2)
        return b.call(aten.add.Tensor, x, b.call(aten.embedding.default, b.parameter("p", 12, HIDDEN), ids, 1))

    result = raised(captured(write), RaiseLinear())
    lookups = result.graph.find_nodes(op="call_function", target=EMBEDDING)
    assert [node.args[1].target for node in lookups] == ["embed.weight", "p"]


def _lookup(b: GraphBuilder, table: Node, ids: Node) -> Node:
    return b.call(aten.embedding.default, table, ids)


@pytest.mark.parametrize("row", [0, 3])
def test_one_row_for_all_tokens_is_that_row(row: int) -> None:
    """Types of tokens, which are all of one type."""

    def write(b: GraphBuilder, x: Node) -> Node:
        ids = b.call(aten.add.Tensor, b.call(aten.mul.Tensor, b.positions, 0), row)
        return b.call(aten.add.Tensor, x, _lookup(b, b.parameter("types", 5, HIDDEN), ids))

    result = raised(captured(write), RaiseLinear())
    selected = only(result, aten.select.int)
    assert (selected.args[0].target, *selected.args[1:]) == ("types", 0, row)


def test_rows_of_ids_that_differ_are_looked_up() -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        ids = b.call(aten.remainder.Scalar, b.positions, 2)
        return b.call(aten.add.Tensor, x, _lookup(b, b.parameter("types", 5, HIDDEN), ids))

    assert "select" not in operators(raised(captured(write), RaiseLinear()))


def _first_rows(b: GraphBuilder, table: Node, start: int | None = 0) -> Node:
    count = b.call(aten.sym_size.int, b.tokens, 0)
    end = b.call(operator.add, count, start) if start else count
    return b.call(aten.slice.Tensor, table, 0, start, end)


@pytest.mark.parametrize("start", [None, 0, 2])
def test_the_first_rows_of_a_parameter_are_a_lookup_by_position(start: int | None) -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        bounded(b, 40)
        return b.call(aten.add.Tensor, x, _first_rows(b, b.parameter("p", 44, HIDDEN), start))

    result = raised(captured(write), RaiseLinear())
    (lookup,) = [node for node in calls(result.graph, EMBEDDING) if node.args[1].target == "p"]
    assert (lookup.args[0].target, lookup.args[2]) == ("positions", start or 0)


def _scaled(b: GraphBuilder, x: Node) -> Node:
    product = b.call(aten.addmm.default, _bias(b), x, _permuted(b))
    product.kwargs = {"beta": 0.5}
    return product


def _rows_of_a_buffer(b: GraphBuilder, x: Node) -> Node:
    """It may be a mask, whose values other passes read."""
    bounded(b, 40)
    return b.call(aten.add.Tensor, x, _first_rows(b, b.constant("p", torch.ones(44, HIDDEN))))


def _every_other_row(b: GraphBuilder, x: Node) -> Node:
    bounded(b, 40)
    twice = b.call(operator.mul, b.call(aten.sym_size.int, b.tokens, 0), 2)
    return b.call(aten.add.Tensor, x, b.call(aten.slice.Tensor, b.parameter("p", 88, HIDDEN), 0, 0, twice, 2))


@pytest.mark.parametrize(
    "write",
    [
        lambda b, x: b.call(aten.mm.default, x, b.call(aten.t.default, x)),
        lambda b, x: b.call(aten.add.Tensor, x, b.call(aten.slice.Tensor, b.parameter("p", 44, HIDDEN), 0, 0, 1)),
        *(_scaled, _rows_of_a_buffer, _every_other_row),
    ],
)
def test_other_products_and_slices_stay(write: Write) -> None:
    assert not RaiseLinear()(captured(write)).modified
