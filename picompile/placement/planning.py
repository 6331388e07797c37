"""Make a plan: state the placement problem within the budgets, solve it, and describe the solution as a plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np

from picompile.errors import DoesNotFitError
from picompile.placement import policies
from picompile.placement.firing import Firing, firing_of_experts
from picompile.placement.goal import PlanGoal
from picompile.placement.machine import Machine
from picompile.placement.model_bytes import ModelBytes
from picompile.placement.plan import Plan, PlanLayer, check_budgets, device_name, memory_account
from picompile.placement.policies import accelerator_only, infeasible_placement_error, least_host_bytes
from picompile.placement.problem import (
    PlacementProblem,
    PlacementTask,
    StagePlace,
    evaluate,
    head_s,
    hidden_after,
    impact_problem,
    latency_problem,
    predicts_early,
)
from picompile.placement.solver import GAP, solve
from picompile.placement.times import GROUP_NEURONS, PartPlaces, computed_by_groups


@dataclass(frozen=True)
class PlanOptions(PlanGoal):
    """The options of a plan: its goal, and the machine, which has the budgets as `gpu_bytes` and `host_bytes`.

    `most_gpu_bytes` is the largest budget that the GPU's memory allows, None if that is not known.
    """

    target: str
    machine: Machine
    gap: float = GAP
    fingerprint: str | None = None
    most_gpu_bytes: int | None = None

    @property
    def capacity(self) -> Machine:
        """The machine with the memory that may be filled: the budgets less their margin (see `plan.check_budgets`)."""
        kept = 1 - self.margin
        machine = self.machine
        return replace(machine, gpu_bytes=int(machine.gpu_bytes * kept), host_bytes=int(machine.host_bytes * kept))


def make_plan(model: ModelBytes, firing: Firing, options: PlanOptions) -> Plan:
    """Return the plan of `model`. Raise `DoesNotFitError`, which names budgets that would do, and `SolverError`."""
    task = task_of(model, firing, options)
    # A side that has everything needs no room for caches that are lent.
    whole = replace(task, lends_caches=False)
    apart = latency_problem(whole)
    on_accelerator = [accelerator_only(whole, apart)] if apart.gpu_capacity_bytes > 0 else []
    fitting = [each for each in on_accelerator if evaluate(apart, each).fits(apart)]
    if fitting:
        places, gap = _solve(whole, apart, options)
        if all(where.kv_cache_on_accelerator for where in _wheres(apart, places)[:-1]):
            return plan_of_places(whole, problem=apart, places=places, gap=gap, options=options)
    problem = latency_problem(task)
    try:
        places, gap = _solve(task, problem, options)
    except DoesNotFitError:
        on_host = policies.host_only(whole, apart)
        fitting += [on_host] if evaluate(apart, on_host).fits(apart) else []
        if not fitting:
            raise
        places = min(fitting, key=lambda each: evaluate(apart, each).cost)
        best, cost = solve(apart, options.gap, known=fitting), evaluate(apart, places).cost
        gap = 0.0 if best is None else max(0.0, (cost - best.bound) / cost)
        return plan_of_places(whole, problem=apart, places=places, gap=gap, options=options)
    return plan_of_places(task, problem, places, gap, options)


def task_of(model: ModelBytes, firing: Firing, options: PlanOptions) -> PlacementTask:
    """Return what is placed, and on how much memory."""
    tokens = model.context // 2 if options.tokens is None else min(options.tokens, model.context)
    machine = options.capacity.dense if model.predictor == "none" else options.capacity
    return PlacementTask(model, firing, machine, tokens)


def plan_of_places(
    task: PlacementTask, problem: PlacementProblem, places: Sequence[StagePlace], gap: float, options: PlanOptions
) -> Plan:
    """Return the plan with the placement `places`, a solution of `problem` with this `gap`."""
    model = task.model
    *wheres, head_where = _wheres(problem, places)
    layers, hidden = list[PlanLayer](), 0.0
    for number, (where, place) in enumerate(zip(wheres, places, strict=False)):
        hidden = hidden if predicts_early(model.layers[number], where) else 0.0
        layers.append(_layer(task, number, where, place.groups, predict_hidden_s=hidden))
        hidden = float(hidden_after(task, number, where)[place.groups])
    head = device_name(head_where.attention_on_accelerator)
    seconds = head_s(model, task.machine, head_where.attention_on_accelerator)
    plan = Plan(
        model=model.name,
        fingerprint=options.fingerprint,
        parameters=model.parameters,
        quant=model.quant,
        predictor=model.predictor,
        context=model.context,
        sequences=model.sequences,
        tokens=task.tokens,
        target=options.target,
        machine=task.machine,
        accelerator_budget_bytes=options.machine.gpu_bytes,
        host_budget_bytes=options.machine.host_bytes,
        margin=options.margin,
        objective=options.objective,
        firing=task.firing.source,
        layers=tuple(layers),
        head=head,
        head_s=seconds,
        switch_s=problem.switch_cost,
        memory=memory_account(task, [*wheres, head_where], places),
        token_s=_token_s(layers, head, seconds, problem.switch_cost),
        gap=gap,
        baselines=dense_speeds(task),
        chunk=model.chunk,
        predictor_quant=model.predictor_quant,
        host_tokens_per_s=_host_speed(task) if options.machine.gpu_bytes else None,
    )
    check_budgets(plan)
    return plan


def _token_s(layers: Sequence[PlanLayer], head: str, head_s: float, switch_s: float) -> float:
    """Return the seconds of a token: of all layers, the head, and transfers where the stream changes sides.

    The stream begins and ends on the host.
    """
    sides = ["host", *(layer.attention for layer in layers), head, "host"]
    switches = sum(one != other for one, other in pairwise(sides))
    return sum(layer.total_s for layer in layers) + head_s + switches * switch_s


def _solve(task: PlacementTask, problem: PlacementProblem, options: PlanOptions) -> tuple[list[StagePlace], float]:
    if options.objective == "impact":
        found = policies.paper(task, problem, kv_cache_on_accelerator=True, gap=options.gap)
        if found is not None:
            return found.places, found.gap
    else:
        solution = solve(problem, options.gap, known=policies.known(task, problem))
        if solution is not None:
            return list(solution.places), solution.gap
    problems = (
        latency_problem if options.objective == "latency" else partial(impact_problem, kv_cache_on_accelerator=True)
    )
    raise infeasible_placement_error(task, problems, options.margin, options.most_gpu_bytes)


def _wheres(problem: PlacementProblem, places: Sequence[StagePlace]) -> list[PartPlaces]:
    """Return the labels of the choices made for each stage."""
    labels = [stage.choices[place.choice].label for stage, place in zip(problem.stages, places, strict=True)]
    wheres = [label for label in labels if isinstance(label, PartPlaces)]
    if len(wheres) < len(labels):
        raise TypeError(labels)
    return wheres


def _layer(task: PlacementTask, number: int, where: PartPlaces, groups: int, predict_hidden_s: float) -> PlanLayer:
    layer, firing = task.model.layers[number], task.firing.layers[number]
    times = task.layer_times(number).times(where)
    seconds = times.at(groups)
    computed = computed_by_groups(firing)
    hot = min(groups * GROUP_NEURONS, layer.neurons)
    return PlanLayer(
        layer=number,
        neurons=layer.neurons,
        hot_neurons=hot,
        attention=device_name(where.attention_on_accelerator),
        kv_cache=device_name(where.kv_cache_on_accelerator),
        predictor=device_name(where.predictor_on_accelerator) if layer.predictor_bytes else "none",
        computed=float(computed[-1]),
        hot_computed=float(computed[groups]),
        **seconds,
        total_s=float(times.total_s[groups]) - predict_hidden_s,
        limit=_limit(seconds, predict_hidden_s),
        hot=None if firing.order is None else tuple(sorted(int(neuron) for neuron in firing.order[:hot])),
        predict_hidden_s=predict_hidden_s,
        experts=layer.experts,
        chosen=layer.chosen,
    )


def _limit(seconds: Mapping[str, float], predict_hidden_s: float) -> str:
    """Return the part that takes most of a layer's time; of hot and cold neurons only the slower side counts."""
    shares = {
        "attention": seconds["attention_s"] + seconds["kv_cache_s"] + seconds["predict_s"] - predict_hidden_s,
        "accelerator": seconds["hot_s"] if seconds["hot_s"] >= seconds["cold_s"] else 0.0,
        "host": seconds["cold_s"] if seconds["cold_s"] > seconds["hot_s"] else 0.0,
        "exchange": seconds["exchange_s"],
    }
    return max(shares, key=lambda name: shares[name])


def dense_speeds(task: PlacementTask) -> dict[str, float]:
    """Return tokens/s of dense inference: with whole layers on the accelerator as far as they fit, and on the host."""
    # Dense inference has no copies of caches.
    dense = replace(policies.dense(task), lends_caches=False)
    problem = latency_problem(dense)
    found = {}
    for name, policy in (("layers-first", policies.layers_first), ("host", policies.host_only)):
        totals = evaluate(problem, policy(dense, problem))
        if totals.fits(problem) and (name == "host" or task.machine.gpu_bytes > 0):
            found[name] = task.model.sequences / totals.cost
    return found


def _host_speed(task: PlacementTask) -> float | None:
    """Return the tokens/s with everything on the host, neurons left out as planned; None if that does not fit."""
    alone = replace(task, lends_caches=False)
    problem = latency_problem(alone)
    totals = evaluate(problem, policies.host_only(alone, problem))
    return task.model.sequences / totals.cost if totals.fits(problem) else None


_SOURCE = "no profile, every neuron counted as firing"


def whole_plan(model: ModelBytes, options: PlanOptions) -> Plan | None:
    """Return the plan that has the whole model on the accelerator; None if that does not fit.

    This can be planned before it is known how neurons fire. The speed and the gap to other placements are those of a
    token for which every neuron fires. Raise `DoesNotFitError` if no placement fits, however neurons fire.
    """
    of_layers = (firing_of_experts(layer.neurons, layer.chosen_share, model.sequences) for layer in model.layers)
    layers = tuple(replace(each, order=np.arange(len(each.shares))) for each in of_layers)
    task = replace(task_of(model, Firing(layers, _SOURCE), options), lends_caches=False)
    problem = latency_problem(task)
    if least_host_bytes(problem) > problem.host_capacity_bytes:
        raise infeasible_placement_error(task, latency_problem, options.margin, options.most_gpu_bytes)
    if problem.gpu_capacity_bytes == 0:
        return None
    places = accelerator_only(task, problem)
    totals = evaluate(problem, places)
    if not totals.fits(problem):
        return None
    best = solve(problem, options.gap, known=[places])
    gap = 0.0 if best is None else max(0.0, (totals.cost - best.bound) / totals.cost)
    return plan_of_places(task, problem, places, gap, options)
