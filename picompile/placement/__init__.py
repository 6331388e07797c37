"""Placement: which parts of a model are on the accelerator, and which are on the host.

`make_plan` makes a plan of three things: a model's bytes (`shape_bytes`, `count_bytes`), how its neurons fire
(`firing_of_curve`, `firing_of_profile`), and a machine (`machine_of` a target). To change a part, look here:

| part | where |
| --- | --- |
| what can be placed where | `problem.places_of`; the memory that it takes is `problem.fixed_bytes` |
| what it costs | `times.LayerTimes`, `launches.count_launches`; `problem.impact_problem` has the paper's objective |
| the placement problem | `problem.PlacementProblem`: choices for each stage, two memories, transfers between stages |
| the solver | `solver.solve`, to a proven gap |
| placement by rules instead | `policies` |

Names are resolved on first use: a machine needs no solver.
"""

from typing import TYPE_CHECKING

from picompile.lazy import lazy

if TYPE_CHECKING:
    from picompile.placement.counting import count_bytes, shape_bytes
    from picompile.placement.firing import Firing, LayerFiring, firing_of_curve, firing_of_profile
    from picompile.placement.machine import Machine, machine_of
    from picompile.placement.model_bytes import LayerBytes, LayerLaunches, ModelBytes, Packing
    from picompile.placement.plan import MemoryRow, Plan, PlanLayer
    from picompile.placement.plan_file import read_plan, write_plan
    from picompile.placement.planning import PlanOptions, make_plan
    from picompile.placement.problem import (
        Choice,
        PlacementProblem,
        PlacementStage,
        PlacementTask,
        StagePlace,
        evaluate,
        impact_problem,
        latency_problem,
    )
    from picompile.placement.solver import Solution, solve

_HOME = {
    "Choice": ".problem",
    "Firing": ".firing",
    "LayerBytes": ".model_bytes",
    "LayerFiring": ".firing",
    "LayerLaunches": ".model_bytes",
    "Machine": ".machine",
    "MemoryRow": ".plan",
    "ModelBytes": ".model_bytes",
    "Packing": ".model_bytes",
    "StagePlace": ".problem",
    "Plan": ".plan",
    "PlanLayer": ".plan",
    "PlanOptions": ".planning",
    "PlacementProblem": ".problem",
    "Solution": ".solver",
    "PlacementStage": ".problem",
    "PlacementTask": ".problem",
    "count_bytes": ".counting",
    "evaluate": ".problem",
    "firing_of_curve": ".firing",
    "firing_of_profile": ".firing",
    "impact_problem": ".problem",
    "latency_problem": ".problem",
    "machine_of": ".machine",
    "make_plan": ".planning",
    "read_plan": ".plan_file",
    "shape_bytes": ".counting",
    "solve": ".solver",
    "write_plan": ".plan_file",
}

__all__ = [
    "Choice",
    "Firing",
    "LayerBytes",
    "LayerFiring",
    "LayerLaunches",
    "Machine",
    "MemoryRow",
    "ModelBytes",
    "Packing",
    "PlacementProblem",
    "PlacementStage",
    "PlacementTask",
    "Plan",
    "PlanLayer",
    "PlanOptions",
    "Solution",
    "StagePlace",
    "count_bytes",
    "evaluate",
    "firing_of_curve",
    "firing_of_profile",
    "impact_problem",
    "latency_problem",
    "machine_of",
    "make_plan",
    "read_plan",
    "shape_bytes",
    "solve",
    "write_plan",
]

__getattr__ = lazy(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(__all__)
