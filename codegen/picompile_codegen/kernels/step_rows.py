"""The rows of a step: how many count, and at which position of which sequence each of them is.

A kernel that depends on positions is made for one mode:
`one`    the next token of one sequence: position step[1], slot step[2];
`chunk`  consecutive tokens of one sequence: row t has position step[1] + t, slot step[2];
`batch`  each row is the next token of a sequence of its own: positions int32 [rows] and slots int32 [rows].
A slot is a sequence's place in the caches. Where they have one place only, nobody asks for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from picompile_codegen.kernels.kernel import KernelFunction
from picompile_codegen.kernels.tensor import Expr, bind

Mode = Literal["one", "chunk", "batch"]


@dataclass(frozen=True)
class StepRows:
    """`count` rows; `position` and `slot` of a row."""

    count: Expr
    position: Callable[[Expr], Expr]
    slot: Callable[[Expr], Expr]


def mode_name(mode: Mode, rows: int) -> str:
    """What tells a kernel of one mode from one of another."""
    return f"b{rows}" if mode == "batch" else f"r{rows}"


def step_rows(function: KernelFunction, mode: Mode, rows: int, context: int, sequences: int) -> StepRows:
    """Declares what `mode` needs and reads what it says of all rows: positions below `context`, slots below
    `sequences`. With 1 of these only positions are asked for.
    """
    count = function.tokens(rows)
    if mode == "batch":
        positions = function.argument("positions", "int32", rows, below=context)
        if sequences == 1:
            return StepRows(count, lambda row: positions[row], lambda _: 0)
        slots = function.argument("slots", "int32", rows, below=sequences)
        return StepRows(count, lambda row: positions[row], lambda row: slots[row])
    first, slot = function.position(context), 0 if sequences == 1 else function.slot(sequences)
    return StepRows(count, lambda row: bind(first + row) if mode == "chunk" else first, lambda _: slot)
