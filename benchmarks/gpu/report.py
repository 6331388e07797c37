"""The tables of `benchmarks.gpu`, and the bars that its figures are held to."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Result = dict[str, Any]
# What is to be reached, how much, what was found, and whether that is enough; None where this run does not say.
Bar = tuple[str, str, str, bool | None]

STAND_IN = "On a stand-in for the GPU: whether it is right shows, and nothing about speed: times mean nothing."
NOT_MEASURED = "not measured"
_PLANNED, _LLAMA = "_4090", "llama.cpp"
_LISTS = ("kernels", "checks", "models", "failed")
# A bar about 5 % firing says nothing where another share was computed.
_ACTIVE, _ACTIVE_WITHIN = 0.05, 0.01

# Of all tables: the columns, the value of a row that each is of, its unit, and how it is written.
_COLUMNS = {
    "what": ("what", 1, "{}"), "firing": ("share", 1, "{:.0%}"), "right": ("right", 1, "{}"),
    "error": ("error", 1, "{:.1e}"), "limit": ("limit", 1, "{:.0e}"), "same tokens": ("same", 1, "{}"),
    "of those that decide": ("decided", 1, "{}"), "of": ("rows", 1, "{}"), "written outside": ("outside", 1, "{}"),
    "µs": ("seconds", 1e-6, "{:.1f}"), "GB/s": ("speed", 1e9, "{:.0f}"), "of copies": ("of_copies", 1, "{:.0%}"),
    "tokens/s": ("tokens_per_s", 1, "{:.2f}"), "of dense offloading": ("ratio", 1, "{:.2f} ×"),
    "threads": ("threads", 1, "{}"), "behind": ("depth", 1, "{}"), "GB of the GPU": ("taken_bytes", 1e9, "{:.2f}"),
    "computed": ("all", 1, "{:.1%}"), "of hot": ("hot", 1, "{:.1%}"), "of cold": ("cold", 1, "{:.1%}"),
    "GPU ms": ("gpu_s", 1e-3, "{:.2f}"), "of it computing": ("compute_s", 1e-3, "{:.2f}"),
    "hot ms": ("hot_s", 1e-3, "{:.2f}"),
    "transfer ms": ("exchange_s", 1e-3, "{:.2f}"), "idle ms": ("idle_s", 1e-3, "{:.2f}"),
    "cold, host ms": ("cold_s", 1e-3, "{:.2f}"), "host GB/s": ("host_bytes_per_s", 1e9, "{:.0f}"),
    "prompt tokens/s": ("prompt_speeds", 1, "{}"), "why not": ("reason", 1, "{}"),
}  # fmt: skip


def empty_results(schema: int, stand_in: bool) -> Result:
    """Return the results of a run that has done nothing."""
    return {"schema": schema, "stand_in": stand_in, "machine": None, **{name: [] for name in _LISTS}}


def merged(runs: Sequence[Result]) -> Result:
    """The results of several runs as those of one. What one had no time for is left out if another had."""
    whole = {key: value for run in runs for key, value in run.items() if value is not None}
    for name in _LISTS:
        rows = [row for run in runs for row in run[name]]
        known = {_name(row) for row in rows if row["is_right"] is not None}
        whole[name] = [row for row in rows if row["is_right"] is not None or _name(row) not in known]
    return whole


def _name(row: Result) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in ("folder", "label", "model", "quant", "variant", "weights"))


def line(row: Result, results: Result) -> str:
    """A row of any of the lists in a line."""
    cells = _cells(row, results)
    return f"{cells.pop('what')}: {', '.join(f'{column} {text}' for column, text in cells.items())}"


def bars(results: Result) -> list[Bar]:
    """All of them, measured or not."""
    return [*_correct(results), _tokens(results["checks"]), *_kernels(results), *_models(results["models"])]


def _correct(results: Result) -> Iterator[Bar]:
    for key, what in (("kernels", "kernels equal eager PyTorch"), ("checks", "whole models equal eager PyTorch")):
        rows = results[key]
        verdict = None if not rows else _all([row["is_right"] for row in rows])
        held = [row for row in rows if "error" in row]
        text = f"{len(rows)}, the worst {_worst(held)}" if held else ""
        wrong = [row["label"] for row in rows if row["is_right"] is False]
        yield what, "within 1e-3", text + (f"; wrong: {', '.join(dict.fromkeys(wrong))}" if wrong else ""), verdict


def _tokens(checks: Sequence[Result]) -> Bar:
    """Compare tokens. Few rows may have two highest logits so close that rounding decides."""
    counts = [row["tokens"] for row in checks if "tokens" in row]
    rows, decided, same = (sum(count[key] for count in counts) for key in ("rows", "decided", "same"))
    is_met = all(count["same"] == count["decided"] > count["rows"] / 2 for count in counts)
    found = f"{same} of {decided}; {rows - decided} more are too close to tell" if counts else ""
    verdict = _all([row["is_right"] for row in checks] + [is_met]) if counts else None
    return "whole models give the same tokens", "all", found, verdict


def _kernels(results: Result) -> Iterator[Bar]:
    copies = results.get("copy_bytes_per_s")
    for form in ("f16", "q4"):
        label = f"ffn masked 28672x8192 {form}"
        rows = [row for row in _timed(results, label) if row.get("share", 0.1) == 0.1]
        shares = [row["moved_bytes"] / row["seconds"] / copies for row in rows if "seconds" in row and copies]
        yield _at_least(f"{label}, 10 % firing", "≥ 70 % of the copy bandwidth", shares, 0.70, "{:.0%}", rows)
    for label, key in (("ffn masked 4096x4096 f16", "gated"), ("ffn without gate 4096x4096 f16", "plain")):
        rows, dense = _timed(results, label), results.get(f"cublas_{key}_s")
        rows = [row for row in rows if row.get("share", 0.0) <= 0.5]
        ratios = [dense / row["seconds"] for row in rows if "seconds" in row and dense]
        yield _at_least(f"{label}, 50 % firing and less, against cuBLAS", "faster", ratios, 1.0, "{:.2f} ×", rows)


def _timed(results: Result, label: str) -> list[Result]:
    return [row for row in results["kernels"] if row["label"] == label]


def _models(rows: Sequence[Result]) -> Iterator[Bar]:
    hybrids = _best([row for row in rows if row["variant"] == "hybrid"])
    for row in hybrids or [{"model": "a model", "quant": "", "variant": "hybrid"}]:
        name, of_row = f"{row['model']} {row['quant']}".strip(), [row] if hybrids else []
        dense, computed = dense_offloading(rows, row), row.get("computed", {}).get("all", 0.0)
        is_said = "tokens_per_s" in row and len(dense) == 2 and abs(computed - _ACTIVE) <= _ACTIVE_WITHIN
        ratios = [row["tokens_per_s"] / max(dense.values())] if is_said else []
        what = f"{name}: hybrid against dense layer offloading, {computed:.1%} computed"
        yield _at_least(what, "≥ 5 ×, at 4 to 6 % computed", ratios, 5.0, "{:.1f} ×", of_row)
        what, taken = f"{name}: the budget as a multiple of the GPU's memory in use", row.get("taken_bytes")
        budgets = [row["budget"] * row["dense_bytes"] / taken] if taken else []
        yield _at_least(what, "≥ 1", budgets, 1.0, "{:.2f}", of_row)


def _best(rows: Sequence[Result]) -> list[Result]:
    """The fastest row of each variant of each model: it was measured with several numbers of threads.

    A wrong one is kept in its place, whatever the others are.
    """
    best: dict[tuple[Any, ...], Result] = {}
    for row in sorted(rows, key=lambda row: (row["is_right"] is False, row.get("tokens_per_s", 0.0))):
        best[_name(row)] = row
    return list(best.values())


def dense_offloading(models: Sequence[Result], row: Result) -> dict[str, float]:
    """Tokens per second of the ways to offload dense layers, of the model of `row` within the same budget; each with
    the best number of threads.
    """
    target = _target(row["variant"])
    alike = [other for other in models if (other["model"], other["quant"]) == (row["model"], row["quant"])]
    ways = {f"{way}{target}" for way in ("layers_dense", "copied")}
    known = [other for other in alike if other["variant"] in ways and "tokens_per_s" in other]
    return {other["variant"]: other["tokens_per_s"] for other in _best(known)}


def _target(variant: str) -> str:
    """The end of a planned variant's name: whose memory it is for."""
    return _PLANNED if variant.endswith(_PLANNED) else ""


def _at_least(what: str, wanted: str, found: Sequence[float], least: float, form: str, rows: Sequence[Result]) -> Bar:
    """The worst of `found` counts. Where one of `rows` is wrong nothing is reached, where one lacks nothing decided."""
    if any(row["is_right"] is False for row in rows):
        return what, wanted, "wrong", False
    if not found or any("reason" in row for row in rows):
        return what, wanted, "", None
    return what, wanted, form.format(min(found)), min(found) >= least


def _all(verdicts: Sequence[bool | None]) -> bool | None:
    return False if False in verdicts else None if None in verdicts else True


def text_of(results: Result) -> str:
    """All tables, the bars last. Of small kernels those that are not right, and how many are."""
    small = [row for row in results["kernels"] if row["folder"] == "small"]
    right = [row for row in small if row["is_right"]]
    verdicts = {None: NOT_MEASURED, True: "yes", False: "NO"}
    parts = [_heading(results), f"{len(right)} small kernels are right, the worst {_worst(right)}" if right else ""]
    others = [row for row in results["kernels"] if row["folder"] != "small"]
    wrong = [row for row in small if not row["is_right"]]
    for rows in (results["failed"], wrong, others, results["checks"], results["models"]):
        parts.append(_table([_cells(row, results) for row in rows], _COLUMNS))
    columns = ("bar", "wanted", "found", "met")
    found = [(what, wanted, text, verdicts[is_met]) for what, wanted, text, is_met in bars(results)]
    parts.append(_table([dict(zip(columns, bar, strict=True)) for bar in found], columns))
    return "\n\n".join(filter(None, parts))


def _heading(results: Result) -> str:
    machine, copies = results.get("machine"), results.get("copy_bytes_per_s")
    if machine is None:
        return "No GPU was found."
    parts = [machine["gpu"], f"CUDA {machine['driver']}", f"PyTorch {machine['torch']}"]
    parts += [f"{copies / 1e9:.0f} GB/s of copies within it"] if copies else []
    for key in ("gated", "plain"):
        seconds = results.get(f"cublas_{key}_s")
        parts += [f"cuBLAS, {key} block of 4096x4096: {seconds * 1e6:.1f} µs"] if seconds else []
    text = ", ".join([*parts, *_of_host(results)])
    return f"{STAND_IN}\n\n{text}" if results["stand_in"] else text


def _of_host(results: Result) -> Iterator[str]:
    if found := results.get("ping_pong"):
        rounds, p50, p99 = found["rounds"], 1e6 * found["p50_s"], 1e6 * found["p99_s"]
        yield f"{rounds} round trips of host and GPU: {p50:.1f} µs in the median, {p99:.1f} µs for 99 %"
    for launches, seconds in results.get("start_s", {}).items():
        started = "takes no more: it waits" if seconds is None else f"is started in {1e6 * seconds:.0f} µs"
        yield f"a graph of {launches} launches behind one that waits for the host {started}"
    for threads, speed in results.get("host_bytes_per_s", {}).items():
        yield f"{speed / 1e9:.0f} GB/s of the host's memory with {threads} threads"


def _table(rows: Sequence[Mapping[str, str]], columns: Iterable[str]) -> str:
    """Those of the columns in which any row has something."""
    names = [name for name in columns if any(name in row for row in rows)]
    lines = [names, ["---"] * len(names), *([row.get(name, "") for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) if rows else ""


def _worst(rows: Sequence[Result]) -> str:
    worst = max(rows, key=lambda row: row["error"])
    return f"{worst['error']:.1e} ({worst['label']})"


def _cells(row: Result, results: Result) -> dict[str, str]:
    """Return the known figures of a row, by column."""
    values = {key: value for key, value in row.items() if key != "hot"} | (row.get("step") or {})
    values |= row.get("computed", {}) | row.get("tokens", {})
    values |= {"right": {True: "yes", False: "NO"}.get(row["is_right"]), "what": _what(row)}
    values["outside"] = ", ".join(row.get("written_outside", ())) or None
    if "prompts" in row:
        speeds = {length: speed for length, speed in row["prompts"].items() if speed is not None}
        values["prompt_speeds"] = ", ".join(f"{length}: {speed:.1f}" for length, speed in speeds.items()) or None
    if row.get("moved_bytes"):
        values["speed"], copies = row["moved_bytes"] / row["seconds"], results.get("copy_bytes_per_s")
        values["of_copies"] = values["speed"] / copies if copies and "weights" not in row else None
    # The ratio is to dense offloading with the same budget; llama.cpp is another engine of that kind.
    if "tokens_per_s" in row and not row.get("variant", _LLAMA).startswith(_LLAMA):
        dense = dense_offloading(results["models"], row).values()
        values["ratio"] = row["tokens_per_s"] / max(dense) if dense else None
    known = {name: column for name, column in _COLUMNS.items() if values.get(column[0]) is not None}
    return {
        name: form.format(values[key] if unit == 1 else values[key] / unit) for name, (key, unit, form) in known.items()
    }


def _what(row: Result) -> str:
    if "label" not in row:
        return f"{row['model']} {row['quant']}, {describe(row)}"
    return f"{row['label']}, weights on the host" if row.get("weights") == "host" else str(row["label"])


def describe(row: Result) -> str:
    """Describe a row of models in words."""
    layers, target = row.get("resident_layers"), _target(row["variant"])
    hot = f"hybrid, {row.get('hot')} neurons of each layer hot"
    text = {
        "hybrid": f"{hot}, as planned" if target else hot,
        "layers_dense": f"{layers} layers on the GPU, dense, the others on the CPU",
        "copied": f"{layers} layers on the GPU, dense, the others copied"
        + ("" if row.get("computes", True) else " and not computed"),
    }[row["variant"].removesuffix(target)]
    return f"memory of a {target.strip('_')}: {text}" if target else text
