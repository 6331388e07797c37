"""Tables of a plan: what it takes of each device, and each of its layers."""

from picompile.placement.plan import Plan, PlanLayer
from picompile.report import numbers
from picompile.report.blocks import UNFOLDED, Table
from picompile.report.memory_pictures import devices_of
from picompile.report.numbers import NOTHING
from picompile.report.plan_colours import DEVICES
from picompile.report.plan_pictures import hot_computed_share, hot_share

_COLUMNS = (
    "layer",
    "neurons",
    "on the GPU",
    "share",
    "of the computed",
    "attention on",
    "KV cache on",
    "predictor on",
    "attention",
    "KV cache",
    "predictor",
    "hot neurons",
    "cold neurons",
    "exchange",
    "layer's time",
    "limit",
)
_TEXTS = frozenset({"attention on", "KV cache on", "predictor on", "limit"})
_WORDS = (
    "Times are predicted for one token. Hot and cold neurons are computed at the same time, so a layer's time has the "
    "longer of the two. Limit: what takes most of it."
)
_LIMITS = {"attention": "attention, cache and predictor", "gpu": "hot neurons", "host": "cold neurons"}


def memory_table(plan: Plan) -> Table:
    """Bytes of each kind on each device, and what there may be of them."""
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
    """What of each layer lies where, and the seconds that are expected of it."""
    rows = [
        (
            str(layer.layer),
            f"{layer.neurons:,}",
            f"{layer.hot_neurons:,}",
            numbers.percent(hot_share(layer)),
            numbers.percent(hot_computed_share(layer)),
            *(DEVICES.get(place, NOTHING) for place in (layer.attention, layer.kv_cache, layer.predictor)),
            *(numbers.seconds(time_s or None) for time_s in _times(layer)),
            limit_text(layer.limit),
        )
        for layer in plan.layers
    ]
    return Table("Each layer of the plan", _COLUMNS, rows, _TEXTS, _WORDS, len(rows) > UNFOLDED).without_empty(NOTHING)


def _times(layer: PlanLayer) -> tuple[float, ...]:
    before = layer.attention_s, layer.kv_cache_s, layer.predict_s
    return (*before, layer.hot_s, layer.cold_s, layer.exchange_s, layer.total_s)


def limit_text(name: str) -> str:
    """What takes most of a layer's time, in words."""
    return _LIMITS.get(name, name)
