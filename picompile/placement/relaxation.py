"""The placement problem over some pieces, as a HiGHS model: its linear relaxation, or the problem in whole numbers.

The columns are, in this order:

1. for each piece, whether it is chosen;
2. for each piece with more than one number of groups, its groups on the accelerator;
3. for each of these pieces, its cost;
4. for each place where the stream can switch sides, whether it does;
5. for each kind of choice, how many stages make it.

A row for each stage allows its early pieces only where the next stage predicts early.

Lines of a piece's hull bound its cost from below. A line is added once a solution lies below it.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import highspy
import numpy as np
from numpy.typing import NDArray

from picompile.errors import SolverError
from picompile.placement.pieces import Piece, Prices, choice_of
from picompile.placement.problem import Choice, PlacementProblem, StagePlace, made_choices

# Each piece begins with this many lines; others are added where a solution is below the hull.
_FIRST_LINES = 6
# The costs of all stages together in units of the solver, whose tolerances are absolute.
_COST_UNITS = 1e4
_OPTIONS = {
    "output_flag": False,
    "threads": 1,
    "random_seed": 0,
    "mip_abs_gap": 0.0,
    "primal_feasibility_tolerance": 1e-7,
    "mip_feasibility_tolerance": 1e-7,
    "dual_feasibility_tolerance": 1e-6,
}
# Options that are tried one by one where HiGHS fails for numerical reasons.
_OTHER_WAYS = (("presolve", "choose"), ("presolve", "off"), ("simplex_strategy", 4), ("solver", "ipm"))
_INFINITY = highspy.kHighsInf
_STATUS = highspy.HighsModelStatus


@dataclass(frozen=True, eq=False)
class Relaxed:
    """A solution of HiGHS: the values of the columns, and a bound on the cost in the problem's units."""

    values: NDArray[np.float64]
    bound: float
    timed_out: bool = False


class Limit(NamedTuple):
    """The fewest and the most stages that may make one kind of choice."""

    low: int
    high: int


class Kind(NamedTuple):
    """A kind of choice; stages that make the same kind of choice are counted together.

    `divisible` says whether the choice has groups to place, `whole` whether all of them are on the accelerator.
    """

    label: Hashable
    divisible: bool
    whole: bool


# All choices that have the stream on the accelerator, whatever their own kind.
ON_ACCELERATOR = Kind("on accelerator", True, True)

Limits = Mapping[Kind, Limit]


class Relaxation:
    """A placement problem over `pieces`, with as many lines as a `gap` needs."""

    def __init__(self, problem: PlacementProblem, pieces: Sequence[Piece], gap: float) -> None:
        self.problem, self.pieces = problem, tuple(pieces)
        wide = [number for number, piece in enumerate(pieces) if not piece.single]
        # The kind of each piece, and the pieces of each.
        self.piece_kinds = tuple(_kind(problem, piece) for piece in pieces)
        self._on_accelerator = np.asarray([_choice(problem, piece).on_accelerator for piece in pieces], dtype=bool)
        self._kinds = self._shared_kinds()
        self._limits = {kind: Limit(0, len(problem.stages)) for kind in self._kinds}
        first = len(pieces)
        self._groups = {number: first + place for place, number in enumerate(wide)}
        self._costs = {number: first + len(wide) + place for place, number in enumerate(wide)}
        first += 2 * len(wide)
        self._switches = range(first, first + _switch_count(problem))
        self._totals = range(self._switches.stop, self._switches.stop + len(self._kinds))
        self._cost_scale = _COST_UNITS / _cost_size(problem)
        self._byte_unit = float(max((stage.group_bytes for stage in problem.stages), default=0) or 1)
        self._tolerance = max(1e-7, gap * _COST_UNITS / 10 / len(problem.stages))
        self._capacity_rows: list[int] = []
        self._kind_rows: list[int] = []
        # (row, stage, coefficient of what the stage has on the GPU)
        self._side_rows: list[tuple[int, int, float]] = []
        # (row, coefficient of each piece)
        self._early_rows: list[tuple[int, dict[int, float]]] = []
        self._lines: set[tuple[int, int]] = set()
        self._highs: Any = _new_solver()
        self._add_columns()
        self._add_rows()

    def limit(self, limits: Limits) -> None:
        """Bound how many stages make each kind of choice; kinds that are not among these pieces are ignored."""
        for column, kind in zip(self._totals, self._kinds, strict=True):
            self._limits[kind] = limits[kind]
            self._highs.changeColBounds(column, *limits[kind])

    @property
    def limits(self) -> Limits:
        """The current bounds on how many stages make each kind of choice."""
        return dict(self._limits)

    def totals(self, relaxed: Relaxed) -> dict[Kind, float]:
        """Return how many stages make each kind of choice in a solution."""
        return {kind: float(relaxed.values[column]) for column, kind in zip(self._totals, self._kinds, strict=True)}

    def weights(self, relaxed: Relaxed) -> dict[tuple[int, Kind], float]:
        """Return the share of each kind of choice in each stage of a solution, by (stage, kind)."""
        found: dict[tuple[int, Kind], float] = {}
        for piece, kind, weight in zip(self.pieces, self.piece_kinds, relaxed.values, strict=False):
            pair = (piece.stage, kind)
            found[pair] = found.get(pair, 0.0) + float(weight)
        return found

    def on_accelerator(self, relaxed: Relaxed) -> float:
        """Return how many stages have the stream on the GPU in a solution."""
        return float(relaxed.values[: len(self.pieces)][self._on_accelerator].sum())

    def relax(self) -> Relaxed | None:
        """Solve the linear relaxation with all lines; None where it has no solution. Raise `SolverError`."""
        while True:
            status = self._run_again()
            if status in (_STATUS.kInfeasible, _STATUS.kUnboundedOrInfeasible):
                return None
            if status != _STATUS.kOptimal:
                raise self._failure(status)
            found = Relaxed(self._values(), self._highs.getInfo().objective_function_value / self._cost_scale)
            if not self.tighten(found):
                return found

    def branch(self, gap: float, start: Sequence[StagePlace] | None, time_limit_s: float) -> Relaxed | None:
        """Solve in whole numbers, from the placement `start`; None where there is no solution.

        Raises `SolverError` where HiGHS fails or finds nothing in the time limit.
        """
        self._make_integer(gap)
        if start is not None:
            self._set_start(start)
        status = self._run(time_limit_s)
        if status in (_STATUS.kInfeasible, _STATUS.kUnboundedOrInfeasible):
            return None
        info = self._highs.getInfo()
        if status not in (_STATUS.kOptimal, _STATUS.kTimeLimit):
            raise self._failure(status)
        if not np.isfinite(info.objective_function_value):
            raise SolverError("HiGHS found no placement in the time that it had")
        return Relaxed(self._values(), info.mip_dual_bound / self._cost_scale, status == _STATUS.kTimeLimit)

    def tighten(self, relaxed: Relaxed) -> bool:
        """Add the lines that a solution is below; return whether there were any."""
        added = False
        for number, groups_column in self._groups.items():
            piece, chosen = self.pieces[number], relaxed.values[number]
            if chosen < 1e-9:
                continue
            groups = relaxed.values[groups_column] / chosen
            # The difference is weighted by the share of the piece in the solution.
            missing = piece.hull(groups) * chosen * self._cost_scale - relaxed.values[self._costs[number]]
            if missing > self._tolerance:
                added |= self._add_line(number, piece.segment(groups))
        return added

    def chosen(self, solution: Relaxed) -> Iterator[tuple[Piece, int]]:
        """Yield the pieces that a solution in whole numbers chooses, each with its groups on the GPU."""
        for number, piece in enumerate(self.pieces):
            if solution.values[number] > 0.5:
                yield piece, piece.low if piece.single else round(float(solution.values[self._groups[number]]))

    def places(self, solution: Relaxed) -> list[StagePlace]:
        """Return the placement of a solution in whole numbers."""
        places = {piece.stage: StagePlace(piece.choice, groups) for piece, groups in self.chosen(solution)}
        return [places[stage] for stage in range(len(self.problem.stages))]

    def prices(self) -> Prices:
        """Return the duals of the relaxation that was solved last."""
        duals = np.asarray(self._highs.getSolution().row_dual) / self._cost_scale
        gpu, host = (max(0.0, -float(duals[row])) / self._byte_unit for row in self._capacity_rows)
        sides = np.zeros(len(self.problem.stages))
        for row, stage, coefficient in self._side_rows:
            sides[stage] -= coefficient * max(0.0, float(duals[row]))
        given = 0.0
        kinds: dict[Kind, float] = {}
        for kind, row in zip(self._kinds, self._kind_rows, strict=True):
            kinds[kind], limit = -float(duals[row]), self._limits[kind]
            given -= max(kinds[kind] * limit.low, kinds[kind] * limit.high)
        beside = [
            kinds.get(kind, 0.0)
            + (float(sides[piece.stage]) + kinds.get(ON_ACCELERATOR, 0.0) if on_accelerator else 0.0)
            for piece, kind, on_accelerator in zip(self.pieces, self.piece_kinds, self._on_accelerator, strict=True)
        ]
        for row, coefficients in self._early_rows:
            price = max(0.0, -float(duals[row]))
            for number, coefficient in coefficients.items():
                beside[number] += coefficient * price
        return Prices(gpu, host_byte=host, pieces=beside, given=given, sides=sides)

    def _run(self, time_limit_s: float = _INFINITY) -> Any:
        # The limit holds for this run alone, whereas `getRunTime` counts all runs.
        self._highs.setOptionValue("time_limit", time_limit_s)
        self._highs.run()
        return self._highs.getModelStatus()

    def _run_again(self) -> Any:
        """Run, and return the status; if HiGHS fails for numerical reasons, run again with other options."""
        status = self._run()
        for option, value in _OTHER_WAYS:
            if status in (_STATUS.kOptimal, _STATUS.kInfeasible, _STATUS.kUnboundedOrInfeasible):
                break
            self._highs.clearSolver()
            before = self._highs.getOptionValue(option)[1]
            self._highs.setOptionValue(option, value)
            status = self._run()
            self._highs.setOptionValue(option, before)
        return status

    def _values(self) -> NDArray[np.float64]:
        return np.asarray(self._highs.getSolution().col_value, dtype=np.float64)

    def _failure(self, status: Any) -> SolverError:
        return SolverError(f"HiGHS ended with {self._highs.modelStatusToString(status)!r} on the placement problem")

    def _shared_kinds(self) -> dict[Kind, list[int]]:
        """Return the pieces by kind, for the kinds that several stages have."""
        kinds: dict[Kind, list[int]] = {}
        for number, kind in enumerate(self.piece_kinds):
            kinds.setdefault(kind, []).append(number)
        kinds[ON_ACCELERATOR] = [number for number, on_accelerator in enumerate(self._on_accelerator) if on_accelerator]
        return {
            kind: members
            for kind, members in kinds.items()
            if len({self.pieces[number].stage for number in members}) > 1
        }

    def _add_columns(self) -> None:
        count = self._totals.stop
        cost, lower, upper = np.zeros(count), np.zeros(count), np.ones(count)
        for number, piece in enumerate(self.pieces):
            if piece.single:
                cost[number] = piece.value[0] * self._cost_scale
                continue
            upper[self._groups[number]] = piece.high
            column = self._costs[number]
            cost[column], lower[column], upper[column] = 1.0, -_INFINITY, _INFINITY
        switches = slice(self._switches.start, self._switches.stop)
        cost[switches] = self.problem.switch_cost * self._cost_scale
        # Switches have no upper bound, so that their prices are in the duals of the rows alone.
        upper[switches] = _INFINITY
        upper[self._totals.start :] = len(self.problem.stages)
        nothing = np.zeros(0, dtype=np.int32)
        self._highs.addCols(count, cost, lower, upper, 0, nothing, nothing, np.zeros(0))

    def _add_rows(self) -> None:
        stages: list[list[int]] = [[] for _ in self.problem.stages]
        for number, piece in enumerate(self.pieces):
            stages[piece.stage].append(number)
        for members in stages:
            self._row(1.0, 1.0, dict.fromkeys(members, 1.0))
        for number, column in self._groups.items():
            piece = self.pieces[number]
            self._row(0.0, _INFINITY, {column: 1.0, number: -float(piece.low)})
            self._row(-_INFINITY, 0.0, {column: 1.0, number: -float(piece.high)})
            last = len(piece.at) - 2
            for segment in np.unique(np.linspace(0, last, min(_FIRST_LINES, last + 1)).round().astype(int)):
                self._add_line(number, int(segment))
        for column, members in zip(self._totals, self._kinds.values(), strict=True):
            self._kind_rows.append(self._row(0.0, 0.0, {column: -1.0} | dict.fromkeys(members, 1.0)))
        self._add_capacities()
        self._add_switches(stages)
        self._add_early(stages)

    def _add_capacities(self) -> None:
        gpu: dict[int, float] = {}
        host: dict[int, float] = {}
        for number, piece in enumerate(self.pieces):
            stage = self.problem.stages[piece.stage]
            choice = stage.choices[piece.choice]
            moved = piece.low * stage.group_bytes if piece.single else 0
            gpu[number] = (choice.gpu_bytes + moved) / self._byte_unit
            host[number] = (choice.host_bytes - moved) / self._byte_unit
            if not piece.single:
                gpu[self._groups[number]] = stage.group_bytes / self._byte_unit
                host[self._groups[number]] = -stage.group_bytes / self._byte_unit
        for row, capacity in ((gpu, self.problem.gpu_capacity_bytes), (host, self.problem.host_capacity_bytes)):
            self._capacity_rows.append(self._row(-_INFINITY, capacity / self._byte_unit, row))

    def _add_switches(self, stages: Sequence[Sequence[int]]) -> None:
        sides = [
            (stage, [number for number in members if self._on_accelerator[number]])
            for stage, members in enumerate(stages)
        ]
        if self.problem.from_host:
            sides = [(0, []), *sides, (0, [])]
        for column, before, after in zip(self._switches, sides, sides[1:], strict=False):
            for one, other in ((before, after), (after, before)):
                row = self._row(
                    0.0, _INFINITY, {column: 1.0} | dict.fromkeys(one[1], -1.0) | dict.fromkeys(other[1], 1.0)
                )
                self._side_rows += [
                    (row, stage, sign) for sign, (stage, members) in ((-1.0, one), (1.0, other)) if members
                ]

    def _add_early(self, stages: Sequence[Sequence[int]]) -> None:
        for members, behind in pairwise(stages):
            early = [number for number in members if self.pieces[number].early]
            if not early:
                continue
            needed = [number for number in behind if _choice(self.problem, self.pieces[number]).predicts_early]
            entries = dict.fromkeys(early, 1.0) | dict.fromkeys(needed, -1.0)
            self._early_rows.append((self._row(-_INFINITY, 0.0, entries), entries))

    def _add_line(self, number: int, segment: int) -> bool:
        if (number, segment) in self._lines:
            return False
        self._lines.add((number, segment))
        value, slope = (self._cost_scale * part for part in self.pieces[number].line(segment))
        self._row(0.0, _INFINITY, {self._costs[number]: 1.0, number: -value, self._groups[number]: -slope})
        return True

    def _row(self, lower: float, upper: float, entries: dict[int, float]) -> int:
        """Add a row and return its number."""
        kept = {column: value for column, value in entries.items() if value}
        columns = np.fromiter(kept.keys(), dtype=np.int32, count=len(kept))
        values = np.fromiter(kept.values(), dtype=np.float64, count=len(kept))
        self._highs.addRow(lower, upper, len(kept), columns, values)
        return int(self._highs.getNumRow()) - 1

    def _make_integer(self, gap: float) -> None:
        self._highs.setOptionValue("mip_rel_gap", gap)
        whole = [*range(len(self.pieces)), *self._groups.values(), *self._totals]
        kinds = np.full(len(whole), highspy.HighsVarType.kInteger.value, dtype=np.uint8)
        self._highs.changeColsIntegrality(len(whole), np.asarray(whole, dtype=np.int32), kinds)

    def _set_start(self, places: Sequence[StagePlace]) -> None:
        """Give HiGHS a placement to start from, as far as it is within the pieces; HiGHS checks it itself."""
        values = np.zeros(self._totals.stop)
        sides = np.zeros(len(self.problem.stages))
        choices = made_choices(self.problem, places)
        for number, piece in enumerate(self.pieces):
            place = places[piece.stage]
            is_made = choice_of(self.problem, piece) is choices[piece.stage]
            if not is_made or not piece.low <= place.groups <= piece.high:
                continue
            values[number] = 1.0
            sides[piece.stage] = self._on_accelerator[number]
            if not piece.single:
                values[self._groups[number]] = place.groups
                values[self._costs[number]] = piece.hull(place.groups) * self._cost_scale
        if self._switches:
            walls = np.zeros(1 if self.problem.from_host else 0)
            values[self._switches.start : self._switches.stop] = np.abs(np.diff(np.concatenate((walls, sides, walls))))
        for column, members in zip(self._totals, self._kinds.values(), strict=True):
            values[column] = values[members].sum()
        solution = highspy.HighsSolution()
        solution.col_value = values.tolist()
        solution.value_valid = True
        self._highs.setSolution(solution)


def _new_solver() -> Any:
    # highspy has no type annotations.
    make: Any = highspy.Highs
    highs = make()
    for option, value in _OPTIONS.items():
        highs.setOptionValue(option, value)
    return highs


def _switch_count(problem: PlacementProblem) -> int:
    if problem.switch_cost == 0:
        return 0
    return len(problem.stages) - 1 + (2 if problem.from_host else 0)


def _cost_size(problem: PlacementProblem) -> float:
    total = sum(max(float(np.abs(choice.costs).mean()) for choice in stage.choices) for stage in problem.stages)
    return total or 1.0


def _choice(problem: PlacementProblem, piece: Piece) -> Choice:
    return problem.stages[piece.stage].choices[piece.choice]


def _kind(problem: PlacementProblem, piece: Piece) -> Kind:
    choice = _choice(problem, piece)
    return Kind(choice.label, len(choice.costs) > 1, piece.low == choice.last)
