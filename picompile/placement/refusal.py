"""What is said where no placement fits: what is lacking, and the smallest budgets that would do."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from picompile.placement.latency import Task
from picompile.placement.program import Program, Stage
from picompile.placement.solve import solve

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
    ways = []
    if (host := _least_bytes(programs(task), on_host=True)) is not None:
        ways.append(f"--host-memory {_budget((host + everywhere + model.embedding_bytes) / kept)}")
    if machine.gpu_bytes_per_s and (gpu := _least_gpu_bytes(task, programs, everywhere)) is not None:
        ways.append(f"--vram-budget {_budget((gpu + everywhere) / kept)}")
    return f"{text}; it would with {' or with '.join(ways)}" if ways else text


def _budget(size: float) -> str:
    """A size for the command line that is no less, for the margin is rounded too."""
    return f"{int(size // _MIB) + 1}MiB"


def _least_gpu_bytes(task: Task, programs: Callable[[Task], Program], everywhere: int) -> int | None:
    """The least bytes of stages on the GPU with the host as it is, to a MiB; None where the host holds too little."""

    def program_of(gpu_bytes: int) -> Program:
        return programs(replace(task, machine=replace(task.machine, gpu_bytes=gpu_bytes + everywhere)))

    high = _least_bytes(program_of(_ANY_BYTES), on_host=False)
    if high is None:
        return None
    # The paper's policy puts more beside the neurons on a larger GPU, so that a smaller one may do.
    low, tried = 0, high - _MIB
    while tried > low:
        program = program_of(tried)
        host = _least_bytes(program, on_host=True)
        if host is not None and host <= program.host_capacity_bytes:
            high = tried
        else:
            low = tried
        tried = (low + high) // 2 if high - low > _MIB else low
    return high


def _least_bytes(program: Program, *, on_host: bool) -> int | None:
    """The least bytes on one device with what the other holds; None where the other holds too little for any."""
    stages = []
    for stage in program.stages:
        choices = []
        for choice in stage.choices:
            moved = np.arange(choice.first, choice.last + 1, dtype=np.float64) * stage.group_bytes
            costs = choice.host_bytes - moved if on_host else choice.gpu_bytes + moved
            choices.append(replace(choice, costs=costs))
        stages.append(Stage(tuple(choices), stage.group_bytes))
    program = replace(program, stages=tuple(stages), switch_cost=0.0)
    if on_host:
        found = solve(replace(program, host_capacity_bytes=_ANY_BYTES))
        return None if found is None else found.totals.host_bytes
    found = solve(program)
    return None if found is None else found.totals.gpu_bytes
