"""Features that lie together in heads or in groups: how they are split, and the check that they can be."""

from collections.abc import Iterator

from torch import Tensor

from picompile_passes.dialect.operator import Call


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[T, heads · d] → [T, heads, d]."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def groups_divide(call: Call) -> Iterator[str]:
    """The groups of a norm divide its features."""
    groups, dim = call.values["groups"], call.columns("x")
    if groups < 1 or dim % groups:
        yield f"{groups} groups do not divide {dim} features"
