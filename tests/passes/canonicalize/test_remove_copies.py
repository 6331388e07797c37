import torch
from torch.fx import Node

from helpers.raising import aten, captured, operators, raised
from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.passes.canonicalize.remove_copies import RemoveCopies


def test_copies_casts_and_dropout_go() -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        x = b.call(aten.alias.default, b.call(aten.detach.default, x))
        x = b.call(aten.to.dtype, b.call(aten.clone.default, x), torch.float32)
        x = b.call(aten.dropout.default, b.call(aten.contiguous.default, x), 0.1, False)
        return b.call(aten.neg.default, x)

    assert operators(raised(captured(write), RemoveCopies())) == {"neg": 1}


def test_a_cast_that_lays_out_memory_anew_leaves_a_copy() -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        half = b.call(aten.slice.Tensor, x, 1, 0, 4)
        return b.call(aten.view.default, b.call(aten._to_copy.default, half, dtype=torch.float32), [-1])

    assert operators(raised(captured(write), RemoveCopies())) == {"slice": 1, "contiguous": 1, "view": 1}


def test_a_cast_of_a_transpose_goes() -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        turned = b.call(aten.t.default, x)
        return b.call(aten.neg.default, b.call(aten._to_copy.default, turned, dtype=torch.float32))

    assert operators(raised(captured(write), RemoveCopies())) == {"t": 1, "neg": 1}


def test_operators_that_change_a_value_or_its_memory_stay() -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        half = b.call(aten.to.dtype, b.call(aten.to.dtype, x, torch.float16), torch.float32)
        columns = b.call(aten.clone.default, b.call(aten.t.default, half))
        columns.kwargs = {"memory_format": torch.contiguous_format}
        columns.meta["val"] = b.call(aten.contiguous.default, b.call(aten.t.default, half)).meta["val"]
        return b.call(aten.view.default, columns, [-1])

    assert not RemoveCopies()(captured(write)).modified


def test_copies_into_other_memory_go() -> None:
    """The contents of the memory matter only where a copy is of another shape or dtype."""

    def write(b: GraphBuilder, x: Node) -> Node:
        memory = b.call(aten.neg.default, x)
        x = b.call(aten.copy.default, memory, x)
        row = b.call(aten.slice.Tensor, x, -1, 0, 1)
        x = b.call(aten.copy.default, x, row)
        return b.call(aten.copy.default, b.call(aten.to.dtype, memory, torch.float16), x)

    assert operators(raised(captured(write), RemoveCopies())) == {"neg": 1, "slice": 1, "copy": 2, "to": 1}


def test_a_copy_lays_out_memory_as_what_it_goes_into() -> None:
    def write(b: GraphBuilder, x: Node) -> Node:
        half = b.call(aten.slice.Tensor, x, 1, 0, 4)
        memory = b.call(aten.contiguous.default, b.call(aten.neg.default, half))
        return b.call(aten.view.default, b.call(aten.copy.default, memory, half), [-1])

    assert operators(raised(captured(write), RemoveCopies())) == {"slice": 1, "contiguous": 1, "view": 1}
