import pytest
import torch
from torch.fx import Node

from helpers.raising import Write, aten, captured, operators, raised
from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.passes.canonicalize.remove_copies import RemoveCopies


def _into_other_memory(b: GraphBuilder, x: Node) -> Node:
    """The contents of the memory matter only where a copy is of another shape or dtype."""
    memory = b.call(aten.neg.default, x)
    x = b.call(aten.copy.default, memory, x)
    x = b.call(aten.copy.default, x, b.call(aten.slice.Tensor, x, -1, 0, 1))
    return b.call(aten.copy.default, b.call(aten.to.dtype, memory, torch.float16), x)


def _copies(b: GraphBuilder, x: Node) -> Node:
    x = b.call(aten.alias.default, b.call(aten.detach.default, x))
    x = b.call(aten.to.dtype, b.call(aten.clone.default, x), torch.float32)
    x = b.call(aten.dropout.default, b.call(aten.contiguous.default, x), 0.1, False)
    return b.call(aten.neg.default, x)


def _cast_of_columns(b: GraphBuilder, x: Node) -> Node:
    """The cast lays out memory anew, and so leaves a copy."""
    half = b.call(aten.slice.Tensor, x, 1, 0, 4)
    return b.call(aten.view.default, b.call(aten._to_copy.default, half, dtype=torch.float32), [-1])


def _copy_of_columns(b: GraphBuilder, x: Node) -> Node:
    """A copy is laid out as the memory that it goes into."""
    half = b.call(aten.slice.Tensor, x, 1, 0, 4)
    memory = b.call(aten.contiguous.default, b.call(aten.neg.default, half))
    return b.call(aten.view.default, b.call(aten.copy.default, memory, half), [-1])


def _cast_of_a_transpose(b: GraphBuilder, x: Node) -> Node:
    turned = b.call(aten.t.default, x)
    return b.call(aten.neg.default, b.call(aten._to_copy.default, turned, dtype=torch.float32))


@pytest.mark.parametrize(
    ("write", "left"),
    [
        (_copies, {"neg": 1}),
        (_into_other_memory, {"neg": 1, "slice": 1, "copy": 2, "to": 1}),
        (_cast_of_columns, {"slice": 1, "contiguous": 1, "view": 1}),
        (_copy_of_columns, {"slice": 1, "contiguous": 1, "view": 1}),
        (_cast_of_a_transpose, {"t": 1, "neg": 1}),
    ],
)
def test_copies_casts_and_dropout_go(write: Write, left: dict[str, int]) -> None:
    assert operators(raised(captured(write), RemoveCopies())) == left


def test_operators_that_change_a_value_or_its_memory_stay() -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        half = b.call(aten.to.dtype, b.call(aten.to.dtype, x, torch.float16), torch.float32)
        columns = b.call(aten.clone.default, b.call(aten.t.default, half))
        columns.kwargs = {"memory_format": torch.contiguous_format}
        columns.meta["val"] = b.call(aten.contiguous.default, b.call(aten.t.default, half)).meta["val"]
        return b.call(aten.view.default, columns, [-1])

    assert not RemoveCopies()(captured(write)).modified
