"""Print a plan as text, in tables 80 columns wide."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from textwrap import fill
from typing import TYPE_CHECKING

from picompile.cli.tables import print_table
from picompile.frontend.activation import activation_title
from picompile.placement.speed import FAST, USABLE, speed_word

if TYPE_CHECKING:
    from rich.table import Table

    from picompile.placement.machine import PlanMachine
    from picompile.placement.plan import Plan, PlanLayer
    from picompile.placement.prompts import PromptEstimate


# A smaller gain is not worth the trouble, and the cost model is not exact enough to tell it from none.
WORTH = 1.1
# Up to this gain the text says how much is enough.
_NEAR = 1.5
_ENOUGH = f"it is worth it from {WORTH} times on"

_WIDTH = 80

_MOST_ROWS = 14
_HEADINGS = {"accelerator": "GPU", "host": "host"}
_KINDS = ("attention", "kv cache", "predictors", "hot neurons", "cold neurons", "output head", "embedding", "tables")
_ORDER = {what: place for place, what in enumerate(_KINDS)}
_LIMITS = {"attention": "attention", "accelerator": "GPU", "host": "CPU", "exchange": "transfer"}

_NOTES = (
    "hot: of the layer's neurons, on the GPU; computed: of them, for a token;",
    "on GPU: of those computed; ms: of all layers of the row;",
    "limit: what takes longest in a layer, in most of the row's.",
    "Tokens/s are predicted, not measured; the GPU code has not run on a GPU yet.",
)
_TRUST = "What is measured and what assumed: docs/cli.md, How far to trust a plan"
_CPU_NOTES = ("Tokens/s are predicted, from the bytes that a token reads; picompile bench measures an artifact.",)


def show_plan(
    plan: "Plan", machine: "PlanMachine", *, activation: str, quant: str, prompt: "PromptEstimate | None" = None
) -> None:
    """Print a plan, the machine that it is for, and what a prompt takes.

    Args:
        plan: the plan.
        machine: the machine.
        activation: the model's, in the dialect's text.
        quant: the format of its weights, as the user calls it.
        prompt: what a prompt takes, None if that is not known.
    """
    for text in (
        *_header(plan, machine, activation, quant),
        "",
        *_speed(plan),
        *_prompt(plan, prompt),
        *_worth(plan, prompt),
        "",
    ):
        print(text)
    print_table(_memory_table(plan), _WIDTH)
    print()
    print_table(_layer_table(plan), _WIDTH)
    for text in (*(_NOTES if plan.accelerator_budget_bytes else _CPU_NOTES), _TRUST):
        print(text)


def _header(plan: "Plan", machine: "PlanMachine", activation: str, quant: str) -> Iterator[str]:
    several = "" if plan.sequences == 1 else f", {plan.sequences} sequences"
    bandwidth = f"{plan.machine.host_bytes_per_s / 1e9:.3g} GB/s"
    model = f"{plan.model}, {_parameters(plan.parameters)}, {activation_title(activation)}"
    yield f"model   {model}, {quant}, context {plan.context}{several}"
    if chosen := {(layer.chosen, layer.experts) for layer in plan.layers if layer.experts}:
        yield f"experts {', '.join(f'{some} of {all_of}' for some, all_of in sorted(chosen))} for a token"
    yield f"firing  {plan.firing}; predictor {plan.predictor}"
    yield f"target  {plan.target}: {machine.target.description}"
    yield f"host    {size(plan.host_budget_bytes)} at {bandwidth} ({machine.host_source})"
    scattered, whole = (each.host_efficiency for each in (plan.machine, plan.machine.dense))
    shares = "" if plan.predictor == "none" else f"{scattered:.0%} of that for scattered rows, "
    yield f"        {shares}{whole:.0%} {'' if shares else 'of that '}for whole matrices ({machine.shares_source})"


def _parameters(count: int) -> str:
    return f"{count / 1e9:.3g} B parameters" if count >= 1e9 else f"{count / 1e6:.3g} M parameters"


def _speed(plan: "Plan") -> Iterator[str]:
    latency = plan.objective == "latency"
    gap = f"no other placement is more than {max(plan.gap, 1e-4):.2%} faster, by this model of costs"
    yield f"{_figure(plan.tokens_per_s)} tokens/s predicted, {plan.tokens} tokens in the cache"
    yield f"       ({gap if latency else f'objective {plan.objective}'})"


def _prompt(plan: "Plan", prompt: "PromptEstimate | None") -> Iterator[str]:
    """Yield the time of a prompt, and that of one with an answer."""
    if prompt is None:
        return
    from picompile.placement.prompts import ANSWER_TOKENS, gain_with_answer

    chunks = f"{prompt.chunks} chunk{'s' if prompt.chunks > 1 else ''} of {size(prompt.copied_bytes)} from the host"
    yield f"{_figure(prompt.total_s)} s predicted to the first token of a prompt of {prompt.tokens}"
    caches = f"; caches {three_digits(prompt.cache_s)} s" if prompt.cache_bytes else ""
    arithmetic = three_digits(prompt.arithmetic_s)
    yield f"       ({chunks}: {three_digits(prompt.copy_s)} s; arithmetic {arithmetic} s{caches})"
    gain = gain_with_answer(plan, prompt)
    if gain is not None:
        seconds = prompt.total_s + ANSWER_TOKENS * plan.token_s
        times = f"{three_digits(gain)} times"
        yield f"{_figure(seconds)} s with an answer of {ANSWER_TOKENS}: {times} as fast as dense inference"


def _worth(plan: "Plan", prompt: "PromptEstimate | None" = None) -> Iterator[str]:
    """Yield the plan's speed compared with dense inference and with the host alone, and what follows from that."""
    for title, speed in _others(plan):
        if speed is None:
            yield f"{'-':>6} {title}: does not fit"
        else:
            gain = three_digits(plan.tokens_per_s / speed)
            yield f"{_figure(speed)} tokens/s {title}: the plan is {gain} times as fast"
    with_gpu = bool(plan.accelerator_budget_bytes and plan.taken_bytes("accelerator"))
    limits = f"fast: {FAST:.0f} tokens/s or more; usable: {USABLE:.0f} or more"
    yield f"It fits, and is {speed_word(plan.tokens_per_s)} ({limits})."
    if plan.predictor != "none":
        yield _wrapped(f"Is leaving out neurons worth it? {verdict(plan, prompt)}")
    elif with_gpu:
        yield _wrapped(f"Is splitting layers worth it? {verdict(plan, prompt)}")
    if plan.accelerator_budget_bytes:
        yield _wrapped(f"Is the GPU worth it? {gpu_verdict(plan)}")


def _wrapped(text: str) -> str:
    return "\n".join(fill(line, _WIDTH) for line in text.splitlines())


def _others(plan: "Plan") -> Iterator[tuple[str, float | None]]:
    """Yield each way of running the model that the plan is compared with, and its tokens/s, None if it does not fit."""
    if plan.accelerator_budget_bytes:
        yield "dense, layers on the GPU", plan.baselines.get("layers-first")
        if plan.predictor != "none":
            yield "on the CPU alone", plan.host_tokens_per_s
    if plan.accelerator_budget_bytes or plan.predictor != "none":
        yield "on the CPU alone, dense", plan.baselines.get("host")


def gpu_verdict(plan: "Plan") -> str:
    """Return whether the plan is worth a GPU, compared with the host alone."""
    if not plan.taken_bytes("accelerator"):
        return "No: nothing is put on it, which would cost more than it saves."
    alone, gain = plan.without_gpu_tokens_per_s, plan.gains["without_gpu"]
    if alone is None or gain is None:
        return "Yes: the host alone does not hold the model."
    figures = f"{three_digits(plan.tokens_per_s)} tokens/s with it, {three_digits(alone)} without"
    enough = f"\n{_ENOUGH.capitalize()}." if gain < _NEAR else ""
    return f"{'Yes' if _is_worth(gain) else 'No'}: {figures}: {three_digits(gain)} times.{enough}"


def verdict(plan: "Plan", prompt: "PromptEstimate | None" = None) -> str:
    """Return whether the plan is worth it, in one or two lines; with a prompt, for that and an answer."""
    if plan.gains["dense"] is None:
        return "Yes: dense, the model does not fit this machine."
    both = None
    if prompt is not None:
        from picompile.placement.prompts import gain_with_answer

        both = gain_with_answer(plan, prompt)
    gain = plan.gains["dense"] if both is None else both
    fits = "\nDense, all of it fits on the GPU." if dense_fits_gpu(plan) else ""
    dense = "times as fast as dense inference"
    if _is_worth(gain):
        enough = f"; {_ENOUGH}" if gain < _NEAR else ""
        return f"Yes: {three_digits(gain)} {dense}{enough}.{fits}"
    if round(gain, 2) >= 1:
        only = f"only {three_digits(gain)} {dense}" if round(gain, 2) > 1 else "as fast as dense inference"
        return f"No: the plan is {only}; {_ENOUGH}.{fits}"
    way = "" if plan.predictor == "none" else "; plan and compile with --predictor none"
    return f"No: dense inference is faster, {three_digits(1 / gain)} times as fast as the plan{way}.{fits}"


def _is_worth(gain: float) -> bool:
    """Return whether a gain is worth it. It is rounded as it is printed, so that 1.10 never counts as below 1.1."""
    return round(gain, 2) >= WORTH


def dense_fits_gpu(plan: "Plan") -> bool:
    """Return whether the GPU could hold everything but the embedding, without predictors."""
    counted = [row for row in plan.memory if row.what not in ("predictors", "embedding", "staging")]
    # GPU and host each have these, so they are counted twice.
    twice = [row for row in counted if row.what in ("workspace", "tables")]
    needed = sum(row.bytes for row in counted) - sum(row.bytes for row in twice if row.device == "accelerator")
    return needed <= plan.machine.gpu_bytes


def three_digits(value: float) -> str:
    """Return a positive number with three significant digits, which is more than a prediction can have."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:#.3g}"


def _figure(value: float) -> str:
    """Return a speed or a time as text, at least six characters wide."""
    return f"{three_digits(value):>6}"


def _memory_table(plan: "Plan") -> "Table":
    from rich.table import Table

    devices = [device for device in _HEADINGS if device == "host" or plan.accelerator_budget_bytes]
    table = Table("memory", box=None, pad_edge=False)
    for device in devices:
        table.add_column(_HEADINGS[device], justify="right", min_width=10)
    for what, by_device in sorted(plan.bytes_by_kind().items(), key=lambda item: _ORDER.get(item[0], len(_ORDER))):
        table.add_row(what, *(size(by_device[device]) if device in by_device else "" for device in devices))
    for title, summed in _sums(plan).items():
        table.add_row(title, *(size(summed[device]) for device in devices))
    return table


def _sums(plan: "Plan") -> dict[str, dict[str, int]]:
    """Return the last rows of the memory table: the bytes that are needed and those that there are, by device."""
    budgets, usable, taken = (
        {device: of_device(device) for device in _HEADINGS}
        for of_device in (plan.budget_bytes, plan.capacity_bytes, plan.taken_bytes)
    )
    return {
        "projected": taken,
        "available": budgets,
        f"margin {100 * plan.margin:.3g}%": {device: budgets[device] - usable[device] for device in budgets},
        "free": {device: usable[device] - taken[device] for device in budgets},
    }


def _layer_table(plan: "Plan") -> "Table":
    from rich.table import Table

    table = Table("layers", "attention", "kv cache", "predictor", box=None, pad_edge=False)
    for title in ("hot", "computed", "on GPU", "ms"):
        table.add_column(title, justify="right")
    table.add_column("limit")
    for layers in ranges(plan.layers):
        table.add_row(*_row(layers))
    table.add_row("head", _HEADINGS[plan.head], "", "", "", "", "", _ms(plan.head_s), "")
    return table


def _row(layers: Sequence["PlanLayer"]) -> Iterable[str]:
    first, last = layers[0], layers[-1]
    neurons = sum(layer.neurons for layer in layers)
    computed = sum(layer.computed for layer in layers)
    on_gpu = sum(layer.hot_computed for layer in layers)
    return (
        str(first.layer) if first is last else f"{first.layer}-{last.layer}",
        _HEADINGS[first.attention],
        _HEADINGS[first.kv_cache],
        _HEADINGS.get(first.predictor, "none"),
        f"{sum(layer.hot_neurons for layer in layers) / neurons:.0%}",
        f"{computed / neurons:.0%}",
        f"{on_gpu / computed:.0%}" if computed else "",
        _ms(sum(layer.total_s for layer in layers)),
        _LIMITS[Counter(layer.limit for layer in layers).most_common(1)[0][0]],
    )


def _ms(seconds: float) -> str:
    return three_digits(seconds * 1e3) if seconds >= 1e-3 else f"{seconds * 1e3:.3f}"


def ranges(layers: Sequence["PlanLayer"]) -> list[list["PlanLayer"]]:
    """Return runs of layers that are placed alike, few enough for a screen.

    Where there are more, layers with a larger difference in their shares of hot neurons count as alike.
    """
    for tolerance in (0.0, 0.05, 0.1, 0.2, 0.5):
        found = _ranges(layers, tolerance)
        if len(found) <= _MOST_ROWS:
            return found
    return _ranges(layers, 1.0)


def _ranges(layers: Sequence["PlanLayer"], tolerance: float) -> list[list["PlanLayer"]]:
    found: list[list[PlanLayer]] = []
    for layer in layers:
        if found and _alike(found[-1][0], layer, tolerance):
            found[-1].append(layer)
        else:
            found.append([layer])
    return found


def _alike(one: "PlanLayer", other: "PlanLayer", tolerance: float) -> bool:
    places, others = ((each.attention, each.kv_cache, each.predictor) for each in (one, other))
    difference = abs(one.hot_neurons / one.neurons - other.hot_neurons / other.neurons)
    return places == others and difference <= tolerance


def size(count: int) -> str:
    """Return bytes with three digits and a binary unit, as memory is sold: `3.21 GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1000:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} GiB" if value < 1000 else f"{value:,.0f} GiB"
