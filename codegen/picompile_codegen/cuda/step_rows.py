"""The rows of a step, see `picompile_codegen.kernels.step_rows`, for kernels that are several launches."""

from collections.abc import Callable

from picompile_codegen.cuda.function import CudaFunction
from picompile_codegen.kernels.step_rows import Mode, StepRows
from picompile_codegen.kernels.tensor import bind


def step_rows(function: CudaFunction, mode: Mode, rows: int, context: int, sequences: int) -> Callable[[], StepRows]:
    """Declares what `mode` needs, before the first launch. What it returns reads the step: call it inside a launch."""
    positions = function.argument("positions", "int32", rows, below=context) if mode == "batch" else None
    has_slots = mode == "batch" and sequences > 1
    slots = function.argument("slots", "int32", rows, below=sequences) if has_slots else None

    def read() -> StepRows:
        count = function.tokens(rows)
        if positions is not None:
            return StepRows(count, lambda row: positions[row], lambda row: 0 if slots is None else slots[row])
        first, slot = function.position(context), 0 if sequences == 1 else function.slot(sequences)
        return StepRows(count, lambda row: bind(first + row) if mode == "chunk" else first, lambda _: slot)

    return read
