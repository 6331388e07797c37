"""The section of a plan, and the part about a plan in an artifact's section. All times are predicted."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from picompile.errors import UsageError
from picompile.placement.plan import SCHEMA, Plan, PlanLayer
from picompile.placement.plan_file import plan_of, read_plan
from picompile.report import numbers
from picompile.report.numbers import NOTHING, PageSection, Part, Pictures, Table
from picompile.report.plan_pictures import (
    DEVICES,
    budget_text,
    devices_of,
    hot_computed_share,
    hot_share,
    hot_shares,
    memory_picture,
    split_picture,
    time_picture,
)
from picompile_runtime.artifact.fields import Fields

# Enough to tell a plan from a file of weights, which would take long to read.
_HEAD_BYTES = 64


@dataclass(frozen=True)
class PlanFacts:
    """A plan, and the file that it is from."""

    path: Path
    plan: Plan


def is_json_object(path: Path) -> bool:
    """Return whether a file begins like one. Raise `UsageError` for a file that cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES).lstrip().startswith(b"{")
    except OSError as error:
        raise UsageError(f"{path}: not readable ({error.strerror})") from error


def read_plan_facts(path: Path) -> PlanFacts:
    """Read the file of a plan. Raise `UsageError` for one that is damaged, or that is none."""
    return PlanFacts(path, read_plan(path))


def plan_of_report(report: Fields) -> Plan | None:
    """Return the plan in an artifact's report.json, None where there is none. Raise `ArtifactError` for a damaged one.

    It does not list the neurons on the GPU: they are in the artifact.
    """
    if report.data.get("plan") is None:
        return None

    fields = report.object("plan")
    if fields.data.get("schema") != SCHEMA:
        raise fields.wrong("schema", f"{SCHEMA}; compile the model again")
    for layer in fields.objects("layers"):
        layer.data.setdefault("hot", None)
    return plan_of(fields)


def _place(part: str) -> Callable[[PlanLayer], str]:
    return lambda layer: DEVICES.get(getattr(layer, part), NOTHING)


def _time(part: str) -> Callable[[PlanLayer], str]:
    return lambda layer: numbers.seconds(getattr(layer, part) or None)


_COLUMNS: Mapping[str, Callable[[PlanLayer], str]] = {
    "layer": lambda layer: str(layer.layer),
    "neurons": lambda layer: f"{layer.neurons:,}",
    "on the GPU": lambda layer: f"{layer.hot_neurons:,}",
    "share": lambda layer: numbers.percent(hot_share(layer)),
    "of the computed": lambda layer: numbers.percent(hot_computed_share(layer)),
    "attention on": _place("attention"),
    "KV cache on": _place("kv_cache"),
    "predictor on": _place("predictor"),
    "attention": _time("attention_s"),
    "KV cache": _time("kv_cache_s"),
    "predictor": _time("predict_s"),
    "of it hidden": _time("predict_hidden_s"),
    "hot neurons": _time("hot_s"),
    "cold neurons": _time("cold_s"),
    "transfer": _time("exchange_s"),
    "layer's time": _time("total_s"),
    "limit": lambda layer: limit_text(layer.limit),
}
_TEXTS = frozenset({"attention on", "KV cache on", "predictor on", "limit"})
_WORDS = (
    "Times are predicted for one token. Hot and cold neurons are computed at the same time, so a layer's time has the "
    "longer of the two. What is hidden of a predictor is computed while the layer before waits for the host, and takes "
    "no time of its own. Limit: what takes most of it."
)
_LIMITS = {
    "attention": "attention, cache and predictor",
    "accelerator": "hot neurons",
    "host": "cold neurons",
    "exchange": "transfer",
}


def memory_table(plan: Plan) -> Table:
    """Return the table of bytes by kind and device, with the budgets."""
    devices = devices_of(plan)
    kinds = sorted(plan.bytes_by_kind().items())
    rows = [(what, *(numbers.size(sizes.get(device)) for device in devices)) for what, sizes in kinds]
    rows += [
        ("all", *(numbers.size(plan.taken_bytes(device)) for device in devices)),
        ("may be taken", *(numbers.size(plan.capacity_bytes(device)) for device in devices)),
        ("budget", *(numbers.size(plan.budget_bytes(device)) for device in devices)),
    ]
    return Table("Memory", ("what", *(DEVICES[device] for device in devices)), rows, frozenset({"what"}))


def layers_table(plan: Plan) -> Table:
    """Return the table of layers: where their parts are, and the predicted times."""
    return Table.of("Each layer of the plan", plan.layers, _COLUMNS, _TEXTS, _WORDS).without_empty()


def limit_text(name: str) -> str:
    """Return the part that takes most of a layer's time, in words."""
    return _LIMITS.get(name, name)


_BASELINES = {"layers-first": "dense, whole layers on the GPU", "host": "dense, all on the host"}
_OBJECTIVES = {"latency": "least time for a token", "impact": "most firings on the GPU"}


def plan_section(anchor: str, source: PlanFacts) -> PageSection:
    """Return the section: facts, places, times and memory."""
    facts = [("model", source.plan.model), *_model_facts(source.plan), *_plan_facts(source.plan)]
    return PageSection(anchor, kind="plan", name=str(source.path), facts=facts, parts=_parts(anchor, source.plan))


def plan_parts(anchor: str, plan: Plan) -> list[Part]:
    """Return the section's part for an artifact that `plan` split: a table of what its own facts lack."""
    columns = ("what", "as planned")
    facts = Table("Placement", columns, _plan_facts(plan), frozenset(columns))
    return [facts, *_parts(f"{anchor}-plan", plan)]


def gain_text(plan: Plan, baseline: str) -> str:
    """Return the ratio of the plan's tokens/s to a baseline's."""
    return numbers.times(numbers.ratio(plan.tokens_per_s, plan.baselines.get(baseline)))


def taken_text(plan: Plan, device: str) -> str:
    """`17.2 GB of 24 GB`; a dash for a device that the plan does not have."""
    if device not in devices_of(plan):
        return NOTHING
    return budget_text(plan, device)


def _parts(anchor: str, plan: Plan) -> list[Part]:
    pictures = [time_picture(f"{anchor}-time", plan), memory_picture(f"{anchor}-memory", plan)]
    if any(layer.hot_neurons for layer in plan.layers):
        pictures.insert(0, split_picture(f"{anchor}-split", plan))
    return [Pictures(pictures), memory_table(plan), layers_table(plan)]


def _model_facts(plan: Plan) -> list[tuple[str, str]]:
    return [
        *([] if plan.fingerprint is None else [("fingerprint", plan.fingerprint[:16])]),
        ("parameters", f"{plan.parameters:,}"),
        ("weights", plan.quant),
        ("predictor", plan.predictor),
        ("context", f"{plan.context:,} tokens, {numbers.counted(plan.sequences, 'sequence')} at a time"),
    ]


def _plan_facts(plan: Plan) -> list[tuple[str, str]]:
    hot, computed = map(numbers.percent, hot_shares(plan))
    return [
        ("target", plan.target),
        *((title, _device_text(plan, device)) for device, title in DEVICES.items()),
        (
            "link",
            f"{numbers.size(plan.machine.pcie_bytes_per_s)}/s, a transfer {numbers.seconds(plan.machine.sync_s)}",
        ),
        ("margin", f"{numbers.percent(plan.margin)} of each budget is left free"),
        ("objective", _OBJECTIVES.get(plan.objective, plan.objective)),
        ("firing from", plan.firing),
        ("neurons on the GPU", f"{hot}, {computed} of those computed"),
        ("output head on", DEVICES[plan.head]),
        ("what limits", _limits_text(plan.layers)),
        ("predicted", _speed_text(plan)),
        ("from the best placement", _gap_text(plan)),
        *((f"predicted, {_BASELINES.get(name, name)}", _baseline_text(plan, name)) for name in plan.baselines),
        *([("predicted, without the GPU", _without_gpu_text(plan))] if plan.accelerator_budget_bytes else []),
    ]


def _device_text(plan: Plan, device: str) -> str:
    if device not in devices_of(plan):
        return "none"
    machine = plan.machine
    speed = machine.gpu_bytes_per_s if device == "accelerator" else machine.host_bytes_per_s
    share = machine.gpu_efficiency if device == "accelerator" else machine.host_efficiency
    budget, reads = numbers.size(plan.budget_bytes(device)), numbers.percent(share, 0)
    return f"budget {budget}, {numbers.size(speed)}/s, of which kernels reach {reads}"


def _speed_text(plan: Plan) -> str:
    cache = f"with {numbers.counted(plan.tokens, 'token')} in the cache"
    return f"{numbers.rate(plan.tokens_per_s)} tokens/s, {numbers.seconds(plan.token_s)} a step, {cache}"


def _gap_text(plan: Plan) -> str:
    # What four digits cannot tell from nothing.
    if plan.gap < 5e-7:
        return "nothing, by the objective"
    return f"at most {numbers.percent(numbers.measured(plan.gap), 4)}, by the objective"


def _baseline_text(plan: Plan, name: str) -> str:
    return f"{numbers.rate(plan.baselines[name])} tokens/s; the plan is {gain_text(plan, name)} as fast"


def _without_gpu_text(plan: Plan) -> str:
    alone = plan.without_gpu_tokens_per_s
    if alone is None:
        return "does not fit"
    gain = numbers.times(numbers.ratio(plan.tokens_per_s, alone))
    return f"{numbers.rate(alone)} tokens/s, the better of dense and not; the plan is {gain} as fast"


def _limits_text(layers: Sequence[PlanLayer]) -> str:
    counts = Counter(layer.limit for layer in layers).most_common()
    return "; ".join(f"{limit_text(name)} in {numbers.counted(count, 'layer')}" for name, count in counts) or NOTHING
