"""Estimates of the speed of models whose neurons are all computed, as the planner counts and times them."""

from dataclasses import dataclass, replace

from picompile.placement.firing import Firing, firing_of_experts
from picompile.placement.machine import Machine
from picompile.placement.model_bytes import ModelBytes
from picompile.placement.plan import memory_account
from picompile.placement.planning import PlanOptions, dense_speeds, task_of
from picompile.placement.policies import host_only
from picompile.placement.problem import latency_problem
from picompile.placement.speed import speed_word
from picompile.placement.times import ALL_ON_HOST


@dataclass(frozen=True)
class Estimate:
    """A model's memory and predicted speed on a machine.

    The speed is for `tokens` in the cache, out of `context`, and None if the model does not fit. A token reads `chosen`
    of the `experts` of a layer, which are 0 where there are none. `available_bytes` may be filled by the model.
    """

    model: str
    parameters: int
    experts: int
    chosen: int
    quant: str
    context: int
    tokens: int
    needed_bytes: int
    available_bytes: int
    tokens_per_s: float | None

    @property
    def verdict(self) -> str:
        """The speed in a word: fast, usable or slow, or that the model does not fit."""
        if self.tokens_per_s is None:
            return "does not fit"
        return speed_word(self.tokens_per_s)


def estimate(model: ModelBytes, machine: Machine) -> Estimate:
    """Return the estimate for a model without predictors, with the part of the machine's memory that plans may fill.

    A GPU has whole layers, as many as fit, unless the host alone is faster. It computes no mixtures of experts.
    """
    machine = replace(machine, gpu_bytes=0) if model.has_experts else machine
    task = task_of(model, _every_neuron(model), PlanOptions(target="", machine=machine))
    places = host_only(task, latency_problem(task))
    account = memory_account(task, [ALL_ON_HOST] * len(places), places)
    return Estimate(
        model.name,
        parameters=model.parameters,
        experts=max(layer.experts for layer in model.layers),
        chosen=max(layer.chosen for layer in model.layers),
        quant=model.quant,
        context=model.context,
        tokens=task.tokens,
        needed_bytes=sum(row.bytes for row in account),
        available_bytes=task.machine.gpu_bytes + task.machine.host_bytes,
        tokens_per_s=max(dense_speeds(task).values(), default=None),
    )


def _every_neuron(model: ModelBytes) -> Firing:
    """Return the firing of a model whose neurons are all computed, of experts those of the chosen ones."""
    kinds = {each: firing_of_experts(each.neurons, each.chosen_share, model.sequences) for each in {*model.layers}}
    return Firing(tuple(kinds[layer] for layer in model.layers), "every neuron")
