import operator
from collections.abc import Callable

import pytest
import torch

from helpers.raising import HIDDEN, Builder, Value, Write, aten, only, operators, raised, stays
from picompile_passes.graph.nodes import calls
from picompile_passes.graph.operands import EMBEDDING, LINEAR, TRANSPOSE
from picompile_passes.passes.canonicalize.raise_linear import RaiseLinear


def _weight(b: Builder, *shape: int) -> Value:
    return b.parameter("w", *(shape or (40, HIDDEN)))


def _bias(b: Builder) -> Value:
    return b.parameter("b", 40)


def _permuted(b: Builder) -> Value:
    return _weight(b).permute([1, 0])


_FORMS: dict[str, tuple[Write, bool]] = {
    "linear": (lambda b, x: x.linear(_weight(b)), False),
    "linear and bias": (lambda b, x: x.linear(_weight(b), _bias(b)), True),
    "matmul of permuted": (lambda b, x: x @ _permuted(b), False),
    "mm of t": (lambda b, x: x.mm(_weight(b).t()), False),
    "mm of transposed": (lambda b, x: x.mm(_weight(b).transpose(-1, -2)), False),
    "addmm": (lambda b, x: _bias(b).addmm(x, _permuted(b)), True),
    "product plus bias": (lambda b, x: x @ _permuted(b) + _bias(b), True),
    "bias plus product": (lambda b, x: _bias(b) + x @ _permuted(b), True),
    "mm of mT": (lambda b, x: x.mm(_weight(b).mT()), False),
    "bias of more dimensions": (lambda b, x: _bias(b).unsqueeze(0).addmm(x, _permuted(b)), True),
    "bias behind a view": (lambda b, x: x.mm(_permuted(b)).unsqueeze(0) + _bias(b).view([1, 1, 40]), True),
    "batched": (lambda b, x: x.unsqueeze(0) @ _permuted(b), False),
}


@pytest.mark.parametrize("form", _FORMS)
def test_every_product_becomes_linear(form: str) -> None:
    write, has_bias = _FORMS[form]
    result = raised(write, RaiseLinear())
    _, weight, bias = only(result, LINEAR).args
    assert weight.target == "w"
    assert (bias is not None and bias.target == "b") == has_bias
    assert operators(result).keys() <= {"linear", "unsqueeze"}


def test_a_product_that_others_use_keeps_its_bias_apart() -> None:
    """And a weight that is stored the other way is transposed."""

    def write(b: Builder, x: Value) -> Value:
        product = x.mm(_weight(b, HIDDEN, 40))
        return (product + _bias(b)) * product

    result = raised(write, RaiseLinear())
    _, weight, bias = only(result, LINEAR).args
    assert bias is None
    assert weight is only(result, TRANSPOSE)
    assert weight.meta["val"].shape == (40, HIDDEN)
    assert operators(result) == {"transpose": 1, "linear": 1, "add": 1, "mul": 1}


def test_a_bias_of_more_dimensions_than_the_product_stays_apart() -> None:
    """Their sum has more, too."""
    result = raised(lambda b, x: x.mm(_permuted(b)) + _bias(b).view([1, 1, 40]), RaiseLinear())
    assert only(result, LINEAR).args[2] is None


@pytest.mark.parametrize(
    "lookup",
    [
        lambda b, table, ids: table.embedding(ids, 1),
        lambda b, table, ids: table.index_select(0, ids),
        lambda b, table, ids: b.call(aten.index.Tensor, table, [ids]),
    ],
    ids=["embedding", "index_select", "index"],
)
def test_a_table_lookup_becomes_embedding(lookup: Callable[[Builder, Value, Value], Value]) -> None:
    result = raised(lambda b, x: x + lookup(b, b.parameter("p", 12, HIDDEN), b.positions + 2), RaiseLinear())
    lookups = result.graph.find_nodes(op="call_function", target=EMBEDDING)
    assert [node.args[1].target for node in lookups] == ["embed.weight", "p"]


@pytest.mark.parametrize("row", [0, 3])
def test_one_row_for_all_tokens_is_that_row(row: int) -> None:
    """Types of tokens, which are all of one type."""

    result = raised(lambda b, x: x + b.parameter("types", 5, HIDDEN).embedding(b.positions * 0 + row), RaiseLinear())
    selected = only(result, aten.select.int)
    assert (selected.args[0].target, *selected.args[1:]) == ("types", 0, row)


def test_rows_of_ids_that_differ_are_looked_up() -> None:

    assert "select" not in operators(
        raised(lambda b, x: x + b.parameter("types", 5, HIDDEN).embedding(b.positions.remainder(2)), RaiseLinear())
    )


def _first_rows(b: Builder, table: Value, start: int | None = 0) -> Value:
    count = b.tokens.sym_size(0)
    return table.slice(0, start, b.call(operator.add, count, start) if start else count)


@pytest.mark.parametrize("start", [None, 0, 2])
def test_the_first_rows_of_a_parameter_are_a_lookup_by_position(start: int | None) -> None:
    def write(b: Builder, x: Value) -> Value:
        b.bounded(40)
        return x + _first_rows(b, b.parameter("p", 44, HIDDEN), start)

    result = raised(write, RaiseLinear())
    (lookup,) = [node for node in calls(result.graph, EMBEDDING) if node.args[1].target == "p"]
    assert (lookup.args[0].target, lookup.args[2]) == ("positions", start or 0)


def _scaled(b: Builder, x: Value) -> Value:
    product = _bias(b).addmm(x, _permuted(b))
    product.kwargs = {"beta": 0.5}
    return product


def _rows_of_a_buffer(b: Builder, x: Value) -> Value:
    """It may be a mask, whose values other passes read."""
    b.bounded(40)
    return x + _first_rows(b, b.constant("p", torch.ones(44, HIDDEN)))


def _every_other_row(b: Builder, x: Value) -> Value:
    b.bounded(40)
    return x + b.parameter("p", 88, HIDDEN).slice(0, 0, b.call(operator.mul, b.tokens.sym_size(0), 2), 2)


@pytest.mark.parametrize(
    "write",
    [
        lambda b, x: x.mm(x.t()),
        lambda b, x: x + b.parameter("p", 44, HIDDEN).slice(0, 0, 1),
        *(_scaled, _rows_of_a_buffer, _every_other_row),
    ],
)
def test_other_products_and_slices_stay(write: Write) -> None:
    assert stays(write, RaiseLinear())
