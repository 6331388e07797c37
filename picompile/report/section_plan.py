"""The section of a plan, and the part of an artifact's section on the plan that it was split by. All is predicted."""

from collections import Counter
from collections.abc import Sequence

from picompile.placement.plan import Plan, PlanLayer
from picompile.report import numbers
from picompile.report.blocks import Part, Pictures, Section, Table
from picompile.report.memory_pictures import devices_of, memory_picture
from picompile.report.numbers import NOTHING
from picompile.report.plan import PlanFacts
from picompile.report.plan_colours import DEVICES
from picompile.report.plan_pictures import hot_shares, split_picture, time_picture
from picompile.report.plan_tables import layers_table, limit_text, memory_table
from picompile.report.timeline_pictures import timeline_pictures

_TIMELINE_WORDS = (
    "Predicted, for the first layers of each kind. Hot neurons run on the GPU while cold ones run on the host; an "
    "exchange waits for both."
)
_BASELINES = {"layers-first": "dense, whole layers on the GPU", "host": "dense, all on the host"}
_OBJECTIVES = {"latency": "least time for a token", "impact": "most firings on the GPU"}


def plan_section(anchor: str, source: PlanFacts) -> Section:
    """Facts, what lies where, where the time goes, and the timeline of a token."""
    facts = [("model", source.plan.model), *_model_facts(source.plan), *_plan_facts(source.plan)]
    return Section(anchor, "plan", str(source.path), facts, _parts(anchor, source.plan))


def plan_parts(anchor: str, plan: Plan) -> list[Part]:
    """The same for an artifact that was split by `plan`: what its own facts do not say is in a table."""
    columns = ("what", "as planned")
    facts = Table("Placement", columns, _plan_facts(plan), frozenset(columns))
    return [facts, *_parts(f"{anchor}-plan", plan)]


def gain_text(plan: Plan, baseline: str) -> str:
    """The plan's tokens/s against those of a baseline."""
    return numbers.times(numbers.ratio(plan.tokens_per_s, plan.baselines.get(baseline)))


def taken_text(plan: Plan, device: str) -> str:
    """`17.2 GB of 24 GB`; a dash for a device that the plan does not have."""
    if device not in devices_of(plan):
        return NOTHING
    return f"{numbers.size(plan.taken_bytes(device))} of {numbers.size(plan.budget_bytes(device))}"


def _parts(anchor: str, plan: Plan) -> list[Part]:
    pictures = [time_picture(f"{anchor}-time", plan), memory_picture(f"{anchor}-memory", plan)]
    if any(layer.hot_neurons for layer in plan.layers):
        pictures.insert(0, split_picture(f"{anchor}-split", plan))
    timelines, left_out = timeline_pictures(f"{anchor}-timeline", plan)
    more = f" {numbers.counted(left_out, 'more kind')} of layers not drawn." if left_out else ""
    return [
        Pictures(pictures),
        Pictures(timelines, title="What runs when", words=_TIMELINE_WORDS + more),
        memory_table(plan),
        layers_table(plan),
    ]


def _model_facts(plan: Plan) -> list[tuple[str, str]]:
    return [
        *([] if plan.fingerprint is None else [("fingerprint", plan.fingerprint[:16])]),
        ("parameters", f"{plan.parameters:,}"),
        ("weights", plan.quant),
        ("predictor", plan.predictor),
        ("context", f"{plan.context:,} tokens, {numbers.counted(plan.batch, 'sequence')} at a time"),
    ]


def _plan_facts(plan: Plan) -> list[tuple[str, str]]:
    hot, computed = map(numbers.percent, hot_shares(plan))
    return [
        ("target", plan.target),
        *((DEVICES[device], _device_text(plan, device)) for device in ("gpu", "host")),
        (
            "link",
            f"{numbers.size(plan.machine.pcie_bytes_per_s)}/s, an exchange {numbers.seconds(plan.machine.sync_s)}",
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
    ]


def _device_text(plan: Plan, device: str) -> str:
    if device not in devices_of(plan):
        return "none"
    machine = plan.machine
    speed = machine.gpu_bytes_per_s if device == "gpu" else machine.host_bytes_per_s
    share = machine.gpu_efficiency if device == "gpu" else machine.host_efficiency
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


def _limits_text(layers: Sequence[PlanLayer]) -> str:
    counts = Counter(layer.limit for layer in layers).most_common()
    return "; ".join(f"{limit_text(name)} in {numbers.counted(count, 'layer')}" for name, count in counts) or NOTHING
