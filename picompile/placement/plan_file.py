"""Plans as JSON files: written whole or not at all, and checked field by field when they are read."""

import json
from collections.abc import Callable
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

from picompile.choices import row_formats
from picompile.errors import SolverError, UsageError
from picompile.output import writing_file
from picompile.placement.goal import OBJECTIVES
from picompile.placement.machine import Machine
from picompile.placement.plan import DEVICES, FORMAT, LIMITS, SCHEMA, MemoryRow, Plan, PlanLayer, check_budgets
from picompile.predictors.description import adding_advice, check_schema, choice, layer_number, number, read_object
from picompile_runtime.artifact.fields import Fields

_WHAT = "a plan of picompile plan"
_ADVICE = "plan again"

# Longer than any token takes, and larger than any bandwidth. Python's JSON may hold NaN and Infinity.
_LONGEST_S = 1e9
_SLOWEST_PER_S = 1e-9
_FASTEST_BYTES_PER_S = 1e18
_MOST_PARAMETERS = 2**60
_MOST_BYTES = 2**62


def write_plan(path: Path, plan: Plan, *, overwrite: bool = True, check: Callable[[], None] = lambda: None) -> None:
    """Write `plan` to `path`, whole or not at all. A link there goes on pointing at the file.

    Raise `UsageError` if a file is in the way, and what `check` raises just before the file takes its place.
    """
    with writing_file(path, overwrite=overwrite, check=check) as file:
        file.write((json.dumps(plan.to_json(), ensure_ascii=False) + "\n").encode())


def read_plan(path: Path) -> Plan:
    """Return the plan in the file `path`. Raise `UsageError` if it holds no plan, or a damaged one."""
    if not path.is_file():
        raise UsageError(f"{path}: {'is no file' if path.exists() else 'no such file'}; picompile plan -o makes one")
    content = read_object(path, FORMAT, _WHAT)
    check_schema(path, content, SCHEMA, _ADVICE)
    with adding_advice(_ADVICE):
        plan = plan_of(Fields(content, f"{path}: damaged"))
    try:
        check_budgets(plan)
    except SolverError as error:
        raise UsageError(f"{path}: damaged: {error}; {_ADVICE}") from error
    return plan


def plan_of(content: Fields) -> Plan:
    """Return the plan that `content` describes. Raise `ArtifactError` for the first field that is wrong."""
    layers = tuple(map(_layer, content.objects("layers")))
    if not layers or [layer.layer for layer in layers] != list(range(len(layers))):
        raise content.wrong("layers", "a list of all layers in order")
    context = content.integer("context", 1)
    plan = Plan(
        model=content.text("model"),
        fingerprint=_fingerprint(content),
        parameters=content.integer("parameters", 1, _MOST_PARAMETERS),
        quant=content.text("quant"),
        predictor=content.text("predictor"),
        context=context,
        sequences=content.integer("sequences", 1),
        tokens=content.integer("tokens", 0, context),
        target=content.text("target"),
        machine=_machine(content.object("machine")),
        accelerator_budget_bytes=content.integer("accelerator_budget_bytes", 0, _MOST_BYTES),
        host_budget_bytes=content.integer("host_budget_bytes", 0, _MOST_BYTES),
        margin=number(content, "margin", 0, 1),
        objective=choice(content, "objective", OBJECTIVES),
        firing=content.text("firing"),
        layers=layers,
        head=choice(content, "head", DEVICES),
        head_s=_seconds(content, "head_s"),
        switch_s=_seconds(content, "switch_s"),
        memory=tuple(map(_memory_row, content.objects("memory"))),
        token_s=number(content, "token_s", 1e-12, _LONGEST_S),
        gap=number(content, "gap", 0),
        baselines=_baselines(content.object("baselines")),
        chunk=content.integer("chunk", 2),
        predictor_quant=choice(content, "predictor_quant", ("auto", *row_formats())),
        # Plans of earlier versions lack it.
        host_tokens_per_s=_optional_number(content, "host_tokens_per_s"),
    )
    _check_speed(content, plan)
    return plan


def _layer(entry: Fields) -> PlanLayer:
    neurons = entry.integer("neurons", 1)
    hot_neurons = entry.integer("hot_neurons", 0, neurons)
    computed = number(entry, "computed", 0, neurons)
    times = [each.name for each in dataclass_fields(PlanLayer) if each.name.endswith("_s")]
    seconds = {name: _seconds(entry, name) for name in times}
    # Plans of earlier versions lack them.
    experts = entry.integer("experts", 0, neurons) if "experts" in entry.data else 0
    return PlanLayer(
        layer=layer_number(entry),
        neurons=neurons,
        hot_neurons=hot_neurons,
        attention=choice(entry, "attention", DEVICES),
        kv_cache=choice(entry, "kv_cache", DEVICES),
        predictor=choice(entry, "predictor", (*DEVICES, "none")),
        computed=computed,
        # A sum of floats in another order.
        hot_computed=number(entry, "hot_computed", 0, computed * (1 + 1e-9)),
        limit=choice(entry, "limit", LIMITS),
        hot=_hot(entry, neurons, hot_neurons),
        **seconds,
        experts=experts,
        chosen=entry.integer("chosen", 1, experts) if experts else 0,
    )


def _hot(entry: Fields, neurons: int, count: int) -> tuple[int, ...] | None:
    """Return the numbers of the hot neurons in rising order; None in a plan that is made from a curve."""
    value = entry.data.get("hot", ())
    if value is None:
        return None
    whole = isinstance(value, list) and all(type(neuron) is int and 0 <= neuron < neurons for neuron in value)
    if not whole or len(value) != count or value != sorted(set(value)):
        raise entry.wrong("hot", f"null or a list of {count} neurons from 0 to {neurons - 1} in order, each once")
    return tuple(value)


def _machine(entry: Fields) -> Machine:
    rates = ("gpu_bytes_per_s", "host_bytes_per_s", "pcie_bytes_per_s")
    values: dict[str, Any] = {key: number(entry, key, 0, _FASTEST_BYTES_PER_S) for key in rates}
    values |= {key: _seconds(entry, key) for key in ("sync_s", "launch_s")}
    values |= {key: number(entry, key, 0, 1) for key in ("gpu_efficiency", "host_efficiency")}
    # Plans of earlier versions lack it.
    if entry.data.get("host_dense_efficiency") is not None:
        values["host_dense_efficiency"] = number(entry, "host_dense_efficiency", 0, 1)
    return Machine(
        gpu_bytes=entry.integer("gpu_bytes", 0, _MOST_BYTES),
        host_bytes=entry.integer("host_bytes", 0, _MOST_BYTES),
        **values,
    )


def _memory_row(entry: Fields) -> MemoryRow:
    return MemoryRow(choice(entry, "device", DEVICES), entry.text("what"), entry.integer("bytes", 0, _MOST_BYTES))


def _baselines(entry: Fields) -> dict[str, float]:
    return {name: number(entry, name, _SLOWEST_PER_S) for name in entry.data}


def _optional_number(entry: Fields, key: str) -> float | None:
    return None if entry.data.get(key) is None else number(entry, key, _SLOWEST_PER_S)


def _seconds(entry: Fields, key: str) -> float:
    return number(entry, key, 0, _LONGEST_S)


def _fingerprint(content: Fields) -> str | None:
    return None if content.data.get("fingerprint", "") is None else content.text("fingerprint")


def _check_speed(content: Fields, plan: Plan) -> None:
    """Raise `ArtifactError` if the speed, which the file has for other programs, is not that of its other fields."""
    if abs(number(content, "tokens_per_s", 0) - plan.tokens_per_s) > 1e-6 * plan.tokens_per_s:
        raise content.wrong("tokens_per_s", f"sequences over token_s, which is {plan.tokens_per_s:.6g}")
