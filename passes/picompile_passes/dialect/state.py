"""The state that an operator keeps between tokens: the KV cache of attention, the memory of a recurrence."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

StateKind = Literal["positional", "recurrent"]

# Stands in a shape for the dimension that grows by a row a token, up to the context.
TOKENS = -1


@dataclass(frozen=True)
class State:
    """The state that an operator keeps for each sequence.

    Attributes:
        kind: `positional` state has a row for each token, so it can be cut anywhere. `recurrent` state has a fixed
            size, and every token changes it: a sequence goes back to where a copy of it was kept. It begins with zeros.
        shapes: returns the shape of each tensor for one sequence, by name, from the arguments of a call. A positional
            tensor has the dimension TOKENS once and before its last dimension, a recurrent one never.
        dtypes: the dtypes that it can be stored in, the default first.
        operands: names of the operands that it depends on; empty if it depends on all.
    """

    kind: StateKind
    shapes: Callable[[Mapping[str, Any]], Mapping[str, tuple[int, ...]]]
    dtypes: tuple[str, ...] = ("float32",)
    operands: tuple[str, ...] = ()
