"""The placement program: what can be chosen for each stage of a token, what it takes, and what it costs.

A stage is a layer, or the output head. For each, one `Choice` is made: where its attention, its KV cache and its
predictor are, and within it how many groups of its neurons are on the GPU. Neurons lie in order of firing, and those
on the GPU are always the most firing ones, so a number of groups says which they are. Stages follow each other;
whoever chooses the other side than the stage before pays for a transfer.

    minimize    Σ_l cost_l(choice_l, n_l) + switch · #{l: side_l ≠ side_(l-1)}
    subject to  Σ_l gpu_l(choice_l) + n_l · group_l  ≤ gpu_capacity
                Σ_l host_l(choice_l) - n_l · group_l ≤ host_capacity

Costs are any numbers: seconds for the latency objective, firings lost for the paper's.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Choice:
    """One way to place a stage; `label` is what it stands for.

    `costs` float64 [k]: with `first`, `first` + 1, … groups on the GPU. `gpu_bytes` and `host_bytes` are taken with no
    group on the GPU; each that is moves the stage's `group_bytes` from the host. `on_gpu` says on which side the stream
    comes in and goes out.
    """

    label: Hashable
    gpu_bytes: int
    host_bytes: int
    costs: NDArray[np.float64]
    first: int = 0
    on_gpu: bool = True

    @property
    def last(self) -> int:
        """The most groups that can be on the GPU."""
        return self.first + len(self.costs) - 1

    def cost(self, groups: int) -> float:
        """What it costs with `groups` on the GPU."""
        return float(self.costs[groups - self.first])


@dataclass(frozen=True, eq=False)
class Stage:
    """One step of a token and the ways to place it, of which there is at least one."""

    choices: tuple[Choice, ...]
    group_bytes: int = 0


@dataclass(frozen=True, eq=False)
class Program:
    """All stages in order. The stream begins and ends on the host where `from_host` is set, and anywhere otherwise."""

    stages: tuple[Stage, ...]
    gpu_capacity_bytes: int
    host_capacity_bytes: int
    switch_cost: float = 0.0
    from_host: bool = False


class Place(NamedTuple):
    """What was chosen for a stage: the number of the choice, and groups on the GPU."""

    choice: int
    groups: int


class Totals(NamedTuple):
    """What a placement of all stages comes to."""

    cost: float
    gpu_bytes: int
    host_bytes: int

    def fits(self, program: Program) -> bool:
        """Whether both devices hold it."""
        return self.gpu_bytes <= program.gpu_capacity_bytes and self.host_bytes <= program.host_capacity_bytes


def evaluate(program: Program, places: Sequence[Place]) -> Totals:
    """Cost and bytes of a placement, the bytes exactly."""
    cost, gpu_bytes, host_bytes = 0.0, 0, 0
    sides = [program.stages[number].choices[place.choice].on_gpu for number, place in enumerate(places)]
    for stage, place in zip(program.stages, places, strict=True):
        choice, moved = stage.choices[place.choice], place.groups * stage.group_bytes
        cost += choice.cost(place.groups)
        gpu_bytes += choice.gpu_bytes + moved
        host_bytes += choice.host_bytes - moved
    if program.from_host:
        sides = [False, *sides, False]
    switches = sum(before != after for before, after in pairwise(sides))
    return Totals(cost + switches * program.switch_cost, gpu_bytes, host_bytes)
