import pytest
import torch

from helpers.raising import Builder, Value, Write, operators, raised, stays
from picompile_passes.passes.canonicalize.remove_copies import RemoveCopies


def _into_other_memory(b: Builder, x: Value) -> Value:
    """The contents of the memory matter only where a copy is of another shape or dtype."""
    memory = -x
    x = memory.copy(x)
    x = x.copy(x.slice(-1, 0, 1))
    return memory.to(torch.float16).copy(x)


def _copies(b: Builder, x: Value) -> Value:
    x = x.detach().alias()
    x = x.clone().to(torch.float32)
    x = x.contiguous().dropout(0.1, False)
    return -x


def _copy_of_columns(b: Builder, x: Value) -> Value:
    """A copy is laid out as the memory that it goes into."""
    half = x.slice(1, 0, 4)
    return (-half).contiguous().copy(half).view([-1])


@pytest.mark.parametrize(
    ("write", "left"),
    [
        (_copies, {"neg": 1}),
        (_into_other_memory, {"neg": 1, "slice": 1, "copy": 2, "to": 1}),
        # The cast lays out memory anew, and so leaves a copy.
        (
            lambda b, x: x.slice(1, 0, 4)._to_copy(dtype=torch.float32).view([-1]),
            {"slice": 1, "contiguous": 1, "view": 1},
        ),
        (_copy_of_columns, {"slice": 1, "contiguous": 1, "view": 1}),
        (lambda b, x: -x.t()._to_copy(dtype=torch.float32), {"t": 1, "neg": 1}),
    ],
)
def test_copies_casts_and_dropout_go(write: Write, left: dict[str, int]) -> None:
    assert operators(raised(write, RemoveCopies())) == left


def test_operators_that_change_a_value_or_its_memory_stay() -> None:
    def write(b: Builder, x: Value) -> Value:
        half = x.to(torch.float16).to(torch.float32)
        columns = half.t().clone()
        columns.kwargs = {"memory_format": torch.contiguous_format}
        columns.meta["val"] = half.t().contiguous().meta["val"]
        return columns.view([-1])

    assert stays(write, RemoveCopies())
