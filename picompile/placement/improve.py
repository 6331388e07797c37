"""From a placement to one of the same choices that fits, and that uses the memory that is left."""

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from picompile.placement.pieces import lower_hull
from picompile.placement.program import Choice, Place, Program, evaluate


class Improver:
    """Changes the numbers of groups on the GPU: fewer where it is too full, then more where that pays.

    A step goes from one vertex of the hull of a choice's costs to the next: in between, costs that bend the other way
    make single groups seem to gain less than they do together. Of all steps the one that costs least, or gains most,
    for its bytes comes first. What no step fits into is filled by the number of groups that gains most.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._vertices: dict[tuple[int, int], list[int]] = {}

    def improve(self, places: Sequence[Place]) -> list[Place]:
        """The placement with other numbers of groups. It may still not fit."""
        counts = [place.groups for place in places]
        free_bytes = self._program.gpu_capacity_bytes - evaluate(self._program, places).gpu_bytes
        free_bytes = self._shrink(places, counts, free_bytes)
        if free_bytes > 0:
            self._grow(places, counts, free_bytes)
        return [Place(place.choice, count) for place, count in zip(places, counts, strict=True)]

    def shrink(self, places: Sequence[Place]) -> list[Place]:
        """The placement with fewer groups, as far as it needs."""
        counts = [place.groups for place in places]
        self._shrink(places, counts, self._program.gpu_capacity_bytes - evaluate(self._program, places).gpu_bytes)
        return [Place(place.choice, count) for place, count in zip(places, counts, strict=True)]

    def _shrink(self, places: Sequence[Place], counts: list[int], free_bytes: int) -> int:
        heap = [step for stage, place in enumerate(places) for step in self._down(stage, place, counts[stage])]
        heapq.heapify(heap)
        while heap and free_bytes < 0:
            _, stage, after = heapq.heappop(heap)
            free_bytes += (counts[stage] - after) * self._program.stages[stage].group_bytes
            counts[stage] = after
            for step in self._down(stage, places[stage], after):
                heapq.heappush(heap, step)
        return free_bytes

    def _grow(self, places: Sequence[Place], counts: list[int], free_bytes: int) -> None:
        heap = [step for stage, place in enumerate(places) for step in self._up(stage, place, counts[stage])]
        heapq.heapify(heap)
        while heap:
            _, stage, after = heapq.heappop(heap)
            size = self._program.stages[stage].group_bytes
            if (after - counts[stage]) * size > free_bytes:
                after = self._filling(stage, places[stage], counts[stage], free_bytes)
            if after == counts[stage]:
                continue
            free_bytes -= (after - counts[stage]) * size
            counts[stage] = after
            for step in self._up(stage, places[stage], after):
                heapq.heappush(heap, step)

    def _down(self, stage: int, place: Place, groups: int) -> list[tuple[float, int, int]]:
        """[(cost for its groups, stage, groups after)] of the next step down, if there is one."""
        choice = self._choice(stage, place)
        hull = self._hull(stage, place)
        below = bisect_left(hull, groups)
        if below == 0:
            return []
        after = hull[below - 1]
        return [((choice.cost(after) - choice.cost(groups)) / (groups - after) / self._size(stage), stage, after)]

    def _up(self, stage: int, place: Place, groups: int) -> list[tuple[float, int, int]]:
        """The same of the next step up that gains."""
        choice = self._choice(stage, place)
        hull = self._hull(stage, place)
        above = bisect_right(hull, groups)
        if above == len(hull):
            return []
        after = hull[above]
        change = choice.cost(after) - choice.cost(groups)
        return [(change / (after - groups) / self._size(stage), stage, after)] if change < 0 else []

    def _filling(self, stage: int, place: Place, groups: int, free_bytes: int) -> int:
        """The best number of groups from `groups` on that takes no more than `free_bytes` more."""
        choice = self._choice(stage, place)
        most = groups + free_bytes // self._size(stage)
        return groups + int(np.argmin(choice.costs[groups - choice.first : most - choice.first + 1]))

    def _hull(self, stage: int, place: Place) -> list[int]:
        """The vertices, as numbers of groups."""
        key = (stage, place.choice)
        if key not in self._vertices:
            choice = self._choice(stage, place)
            self._vertices[key] = (lower_hull(choice.costs) + choice.first).tolist()
        return self._vertices[key]

    def _choice(self, stage: int, place: Place) -> Choice:
        return self._program.stages[stage].choices[place.choice]

    def _size(self, stage: int) -> int:
        return max(1, self._program.stages[stage].group_bytes)
