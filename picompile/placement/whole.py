"""What can be planned before it is known how neurons fire: whether a model fits, and all of it on the GPU."""

import numpy as np

from picompile.errors import DoesNotFitError
from picompile.placement.firing import Firing, LayerFiring
from picompile.placement.latency import latency_program
from picompile.placement.model_bytes import ModelBytes
from picompile.placement.plan import Plan
from picompile.placement.planning import PlanOptions, plan_of_places, task_of
from picompile.placement.policies import gpu_only
from picompile.placement.program import evaluate
from picompile.placement.refusal import least_host_bytes, refusal
from picompile.placement.solver import solve

_SOURCE = "no profile, every neuron counted as firing"


def whole_plan(model: ModelBytes, options: PlanOptions) -> Plan | None:
    """Every neuron of `model` on the GPU, and all that can be beside them; None where that does not fit.

    Its speed, and the gap to other placements, are those of a token that every neuron fires on. Raises
    `DoesNotFitError` where no placement fits, however neurons fire.
    """
    layers = tuple(LayerFiring(np.ones(layer.neurons), np.arange(layer.neurons)) for layer in model.layers)
    task = task_of(model, Firing(layers, _SOURCE), options)
    program = latency_program(task)
    if least_host_bytes(program) > program.host_capacity_bytes:
        raise DoesNotFitError(refusal(task, latency_program, options.margin))
    if program.gpu_capacity_bytes == 0:
        return None
    places = gpu_only(task, program)
    totals = evaluate(program, places)
    if not totals.fits(program):
        return None
    best = solve(program, options.gap, known=[places])
    gap = 0.0 if best is None else max(0.0, (totals.cost - best.bound) / totals.cost)
    return plan_of_places(task, program, places, gap, options)
