"""The placement problems without the prefix form: written out in full, with a binary x_lk for every group k of layer l.

`solve` knows that the hot groups of a layer are the most firing ones and chooses a number for each layer. Here any set
of groups may be chosen, so its answers can be compared with the problem they stand for. The parts of layers that are
not neurons, and the head, are placed beforehand.

A set of groups that is no prefix is never better for the paper's objective. It can be for a token's time, where the GPU
is the slower side: another set may come closer to the time of the host. It gains less than the time of one group on the
GPU, as long as the host has room. For take such a set of n groups, and the fewest first groups that bring as much work
to the GPU. These are at most n, they leave no more work to the host and no more often a transfer, and without the last
of them they would be less work than the set.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import highspy
import numpy as np
from numpy.typing import ArrayLike, NDArray

from picompile.errors import SolverError
from picompile.placement.problem import (
    PlacementProblem,
    PlacementTask,
    capacities,
    dense_first,
    fixed_bytes,
    group_bytes,
    head_s,
    latency_problem,
    least_groups,
)
from picompile.placement.solver import GAP
from picompile.placement.times import (
    ALL_ON_ACCELERATOR,
    ALL_ON_HOST,
    GROUP_NEURONS,
    PartPlaces,
    Times,
    computed_by_groups,
)

TIME_LIMIT_S = 190.0

_INFINITY = highspy.kHighsInf
_STATUS = highspy.HighsModelStatus
_NOTHING = np.zeros(0)
# Costs of the latency program are in microseconds: the solver's tolerances are absolute.
_PER_SECOND = 1e6


@dataclass(frozen=True, eq=False)
class Direct:
    """A solution. `hot` bool [groups] for each layer: the groups on the GPU. `bound` and `gap` as in `Solution`."""

    hot: tuple[NDArray[np.bool_], ...]
    cost: float
    bound: float
    gap: float
    seconds: float


def direct_impact(
    task: PlacementTask, kv_cache_on_accelerator: bool = False, gap: float = GAP, time_limit_s: float = TIME_LIMIT_S
) -> Direct | None:
    """Solve the problem of `impact_program`, in equations 1 to 8 of the paper: binary y_l is 1 where a layer is split.

        minimize   - Σ_lk fired_lk x_lk
        subject to C_l y_l ≤ Σ_k x_lk ≤ groups_l y_l, and the memory of both devices

    None where nothing fits. Raises `SolverError` where HiGHS finds nothing in `time_limit_s`.
    """
    wheres, head_on_accelerator = dense_first(task, kv_cache_on_accelerator)
    model, groups = _Model(), list[range]()
    for layer, firing, where in zip(task.model.layers, task.firing.layers, wheres, strict=True):
        fired = np.diff(computed_by_groups(firing))
        least = least_groups(task.machine, layer.neuron_bytes) if where.attention_on_accelerator else None
        x = model.columns(-fired)
        y = model.columns([0.0], upper=0.0 if least is None else 1.0)[0]
        model.row(-_INFINITY, 0.0, [*x, y], [1.0] * len(x) + [-float(len(x))])
        model.row(0.0, _INFINITY, [*x, y], [1.0] * len(x) + [-float(least or 0)])
        groups.append(x)
    # Inequality 6 is strict.
    _add_memory(model, task, wheres, head_on_accelerator, groups, kept_bytes=1)
    return model.solve(groups, 0.0, 1.0, gap, time_limit_s)


def direct_latency(
    task: PlacementTask,
    wheres: Sequence[PartPlaces],
    head_on_accelerator: bool,
    ordered: bool = True,
    gap: float = GAP,
    time_limit_s: float = TIME_LIMIT_S,
) -> Direct | None:
    """Solve `latency_problem` with layers placed as in `wheres`; t_l is the time of a layer's slower side.

        minimize   Σ_l t_l + exchanges_l
        subject to t_l ≥ Σ_k hot_lk x_lk + launch_l, t_l ≥ Σ_k cold_lk (1 - x_lk), and the memory of both devices

    `ordered` adds x_lk ≥ x_l(k+1), which is the problem that `solve` solves, exactly. Without, a layer with cold groups
    transfers on every token, as it does where all neurons are looked at; where it does not, the cost is too high.

    For tasks with a GPU. None where nothing fits. Raises `SolverError` where HiGHS finds nothing in `time_limit_s`.
    """
    model, groups = _Model(), list[range]()
    offset_s = _given_s(task, wheres, head_on_accelerator)
    for number, where in enumerate(wheres):
        times = task.layer_times(number).times(where)
        offset_s += float((times.attention_s + times.kv_cache_s + times.predict_s)[0])
        add = _add_ordered if ordered else _add_unordered
        groups.append(add(model, times, _reading_s(task, times)))
    _add_memory(model, task, wheres, head_on_accelerator, groups)
    return model.solve(groups, offset_s, 1 / _PER_SECOND, gap, time_limit_s)


def most_lost_s(task: PlacementTask) -> float:
    """Return the most that a token's time with prefixes is above that with any sets: a group on the GPU for each layer.

    This holds where the host has room for as many groups more.
    """
    lost_bytes = 0.0
    for layer, firing in zip(task.model.layers, task.firing.layers, strict=True):
        looked_at = min(GROUP_NEURONS, layer.neurons) * layer.gating_bytes
        lost_bytes += looked_at + computed_by_groups(firing)[1] * (layer.neuron_bytes - layer.gating_bytes)
    return float(lost_bytes) / task.machine.gpu_read_bytes_per_s


def restricted(program: PlacementProblem, wheres: Sequence[PartPlaces], head_on_accelerator: bool) -> PlacementProblem:
    """Return a latency program with only the choices `wheres`."""
    labels = [*wheres, ALL_ON_ACCELERATOR if head_on_accelerator else ALL_ON_HOST]
    stages = (
        replace(stage, choices=tuple(choice for choice in stage.choices if choice.label == label))
        for stage, label in zip(program.stages, labels, strict=True)
    )
    return replace(program, stages=tuple(stages))


def _given_s(task: PlacementTask, wheres: Sequence[PartPlaces], head_on_accelerator: bool) -> float:
    """Return the seconds of the head, and of the transfers where the stream changes sides."""
    sides = [False, *(where.attention_on_accelerator for where in wheres), head_on_accelerator, False]
    switches = sum(before != after for before, after in itertools.pairwise(sides))
    return head_s(task.model, task.machine, head_on_accelerator) + switches * latency_problem(task).switch_cost


def _reading_s(task: PlacementTask, times: Times) -> NDArray[np.float64]:
    """Return the seconds that each group takes on the GPU: float64 [groups]."""
    reads: NDArray[np.float64] = -np.diff(times.cold_s) * task.machine.host_read_bytes_per_s
    return reads / task.machine.gpu_read_bytes_per_s


def _add_ordered(model: "_Model", times: Times, reading_s: NDArray[np.float64]) -> range:
    """Add a layer: with the groups in order, each adds its step of whatever depends on their number."""
    exchange_s = times.exchange_s * _PER_SECOND
    x = model.columns(np.diff(exchange_s), constant=float(exchange_s[0]))
    _add_sides(model, times, x, x, np.diff(times.hot_s))
    for before, after in itertools.pairwise(x):
        model.row(0.0, _INFINITY, [before, after], [1.0, -1.0])
    return x


def _add_unordered(model: "_Model", times: Times, reading_s: NDArray[np.float64]) -> range:
    """Add a layer, with binaries for whether any of its groups is hot, and whether any is cold."""
    exchange_s = times.exchange_s * _PER_SECOND
    count, most = len(reading_s), float(exchange_s.max())
    x = model.columns(np.zeros(count))
    saved = np.asarray([most - exchange_s[0], most - exchange_s[-1]])
    any_hot, any_cold = model.columns(saved, constant=most - float(saved.sum()))
    model.row(-_INFINITY, 0.0, [*x, any_hot], [1.0] * count + [-float(count)])
    model.row(float(count), _INFINITY, [*x, any_cold], [1.0] * count + [float(count)])
    launch_s = float(times.hot_s[-1] - reading_s.sum())
    _add_sides(model, times, x, [*x, any_hot], [*reading_s, launch_s])
    return x


def _add_sides(model: "_Model", times: Times, x: range, on_accelerator: Sequence[int], on_gpu_s: ArrayLike) -> None:
    """Add the column of the slower side, and its rows."""
    slower = model.columns([1.0], upper=_INFINITY, whole=False)[0]
    model.row(0.0, _INFINITY, [slower, *on_accelerator], [1.0, *(-_PER_SECOND * np.asarray(on_gpu_s))])
    cold_s = times.cold_s * _PER_SECOND
    model.row(float(cold_s[0]), _INFINITY, [slower, *x], [1.0, *(-np.diff(cold_s))])


def _add_memory(
    model: "_Model",
    task: PlacementTask,
    wheres: Sequence[PartPlaces],
    head_on_accelerator: bool,
    groups: Sequence[range],
    kept_bytes: int = 0,
) -> None:
    gpu_free, host_free = (capacity - kept_bytes for capacity in capacities(task))
    gpu_free -= task.model.head_bytes if head_on_accelerator else 0
    host_free -= 0 if head_on_accelerator else task.model.head_bytes
    sizes = []
    for layer, where, x in zip(task.model.layers, wheres, groups, strict=True):
        on_accelerator, on_host = fixed_bytes(layer, where)
        gpu_free, host_free = gpu_free - on_accelerator, host_free - on_host
        sizes += [float(group_bytes(layer))] * len(x)
    unit = max(sizes)
    columns, values = [column for x in groups for column in x], np.asarray(sizes) / unit
    model.row(-_INFINITY, gpu_free / unit, columns, values)
    model.row(-host_free / unit, _INFINITY, columns, values)


class _Model:
    """Columns and rows of a program for HiGHS."""

    def __init__(self) -> None:
        make: Any = highspy.Highs
        self._highs = make()
        options = {"output_flag": False, "threads": 1, "mip_abs_gap": 0.0, "mip_feasibility_tolerance": 1e-9}
        for option, value in options.items():
            self._highs.setOptionValue(option, value)
        self._count, self._constant = 0, 0.0

    def columns(self, costs: ArrayLike, upper: float = 1.0, whole: bool = True, constant: float = 0.0) -> range:
        """Add columns from 0 to `upper`, and a constant to the objective; return the columns' numbers."""
        first = self._count
        for cost in np.asarray(costs, dtype=np.float64):
            self._highs.addCol(cost, 0.0, upper, 0, _NOTHING, _NOTHING)
            if whole:
                self._highs.changeColIntegrality(self._count, highspy.HighsVarType.kInteger)
            self._count += 1
        self._constant += constant
        return range(first, self._count)

    def row(self, lower: float, upper: float, columns: Sequence[int], values: ArrayLike) -> None:
        numbers = np.asarray(columns, dtype=np.int32)
        self._highs.addRow(lower, upper, len(numbers), numbers, np.asarray(values, dtype=np.float64))

    def solve(
        self, groups: Sequence[range], offset: float, unit: float, gap: float, time_limit_s: float
    ) -> Direct | None:
        """Solve it; an objective of 1 is a cost of `unit`, to which `offset` is added."""
        highs = self._highs
        highs.changeObjectiveOffset(self._constant + offset / unit)
        highs.setOptionValue("mip_rel_gap", gap)
        highs.setOptionValue("time_limit", time_limit_s)
        highs.run()
        status, info = highs.getModelStatus(), highs.getInfo()
        if status in (_STATUS.kInfeasible, _STATUS.kUnboundedOrInfeasible):
            return None
        if status not in (_STATUS.kOptimal, _STATUS.kTimeLimit):
            raise SolverError(f"HiGHS ended with {highs.modelStatusToString(status)!r} on the direct program")
        if not np.isfinite(info.objective_function_value):
            raise SolverError(f"HiGHS found no solution of the direct program in {time_limit_s:.0f} s")
        values = np.asarray(highs.getSolution().col_value)
        cost, bound = info.objective_function_value * unit, info.mip_dual_bound * unit
        hot = tuple(values[x.start : x.stop] > 0.5 for x in groups)
        return Direct(hot, cost, bound, (cost - bound) / max(abs(cost), 1e-300), highs.getRunTime())
