"""What is said where no placement fits: what is lacking, and the smallest budgets that would do."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from picompile.errors import SolverError
from picompile.placement.latency import Task
from picompile.placement.program import Program, Stage
from picompile.placement.solver import GAP, solve

_ANY_BYTES = 1 << 62
_MIB, _GIB = 2**20, 2**30


def refusal(task: Task, programs: Callable[[Task], Program], margin: float) -> str:
    """One line. `programs` makes the program of a task; the share `margin` of budgets that are named is left free."""
    model, machine, kept = task.model, task.machine, 1 - margin
    everywhere = model.workspace_bytes + model.table_bytes
    text = (
        f"{model.name} in {model.quant} does not fit: {max(0, machine.host_bytes) / _GIB:.2f} GiB of host memory may "
        f"be taken and {machine.gpu_bytes / _GIB:.2f} GiB of the GPU's"
    )
    host = least_host_bytes(programs(task)) + everywhere + model.embedding_bytes
    ways = [f"--host-memory {_budget(host / kept)}"]
    if machine.gpu_bytes_per_s and (gpu := _least_gpu_bytes(task, programs, everywhere, kept * _MIB)) is not None:
        ways.append(f"--vram-budget {_budget((gpu + everywhere) / kept)}")
    return f"{text}; it would with {' or with '.join(ways)}"


def _budget(size: float) -> str:
    """A size for the command line that is no less, for the margin is rounded too."""
    return f"{int(size // _MIB) + 1}MiB"


def _least_gpu_bytes(task: Task, programs: Callable[[Task], Program], everywhere: int, tolerance: float) -> int | None:
    """The least bytes of stages on the GPU with the host as it is, within `tolerance` bytes or `GAP`.

    None where no number is enough. `everywhere` are the bytes that the GPU has beside stages.

    What the host lacks with a GPU of some size is the least that it must have more. Only the paper's policy may do
    with less, for on a larger GPU it puts more beside the neurons: what was found is halved, down to what doesn't do.
    """

    def lacking(gpu_bytes: int) -> int:
        program = programs(replace(task, machine=replace(task.machine, gpu_bytes=gpu_bytes + everywhere)))
        return least_host_bytes(program) - program.host_capacity_bytes

    if lacking(_ANY_BYTES) > 0:
        return None
    low, high, tried = -1, _ANY_BYTES, 0
    while high - low > max(tolerance, GAP * high):
        more = lacking(tried)
        low, high = (tried, high) if more > 0 else (low, tried)
        tried = low + max(more, int(tolerance), 1) if high == _ANY_BYTES else (low + high) // 2
    return high


def least_host_bytes(program: Program) -> int:
    """The least bytes of stages on a host of any size, with the GPU as it is."""
    stages = []
    for stage in program.stages:
        choices = []
        for choice in stage.choices:
            moved = np.arange(choice.first, choice.last + 1, dtype=np.float64) * stage.group_bytes
            choices.append(replace(choice, costs=choice.host_bytes - moved))
        stages.append(Stage(tuple(choices), stage.group_bytes))
    found = solve(replace(program, stages=tuple(stages), switch_cost=0.0, host_capacity_bytes=_ANY_BYTES))
    if found is None:
        raise SolverError("nothing fits a host of any size")
    return found.totals.host_bytes
