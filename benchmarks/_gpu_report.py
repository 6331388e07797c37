"""The tables of `gpu.py`, and the bars that its figures are held to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Result = dict[str, Any]

STAND_IN = "On a stand-in for the GPU: whether it is right shows, and nothing about speed."
_NONE = "not measured"


@dataclass(frozen=True)
class Bar:
    """Something to be reached. `found` is None where this run does not say."""

    what: str
    wanted: str
    found: str | None
    is_met: bool | None

    @property
    def row(self) -> str:
        """A row of the table."""
        verdict = {None: _NONE, True: "yes", False: "NO"}[self.is_met]
        return f"| {self.what} | {self.wanted} | {self.found or ''} | {verdict} |"


def bars(results: Result) -> list[Bar]:
    """All of them, measured or not."""
    return [*_correct(results), *_kernels(results), *_models(results)]


def _correct(results: Result) -> Iterator[Bar]:
    for key, what in (("kernels", "kernels equal eager PyTorch"), ("checks", "whole models equal eager PyTorch")):
        rows = [row for row in results[key] if row.get("limit", 1e-3) <= 1e-3]
        if not rows:
            yield Bar(what, "within 1e-3", None, None)
            continue
        worst = max(rows, key=lambda row: row["error"])
        failed = [row["label"] for row in results[key] if not row["is_right"]]
        text = f"{len(rows)}, the worst {worst['error']:.1e} ({worst['label']})"
        yield Bar(what, "within 1e-3", text + (f"; wrong: {', '.join(failed)}" if failed else ""), not failed)


def _kernels(results: Result) -> Iterator[Bar]:
    for form in ("f16", "q4"):
        label = f"ffn masked 28672x8192 {form}"
        row = _one(results["kernels"], label=label, share=0.1)
        share = None if row is None else row.get("copy_share")
        yield _at_least(f"{label}, 10 % firing", "≥ 70 % of the copy bandwidth", share, 0.70, "{:.0%}")
    for label, key in (("ffn masked 4096x4096 f16", "gated"), ("ffn without gate 4096x4096 f16", "plain")):
        row, dense = _one(results["kernels"], label=label, share=0.5), results["cublas"].get(key)
        ratio = None if row is None or dense is None or "seconds" not in row else dense / row["seconds"]
        yield _at_least(f"{label}, 50 % firing, against cuBLAS", "faster", ratio, 1.0, "{:.2f} ×")


def _models(results: Result) -> Iterator[Bar]:
    hybrids = [row for row in results["models"] if row["variant"] == "hybrid" and row.get("skew")]
    for row in hybrids or [None]:
        name = "a model" if row is None else f"{row['model']} {row['quant']}"
        dense = [] if row is None else dense_offloading(results["models"], row)
        ratio = row["tokens_per_s"] / max(dense) if row and dense and "tokens_per_s" in row else None
        yield _at_least(f"{name}: hybrid against dense layer offloading", "≥ 5 ×", ratio, 5.0, "{:.1f} ×")
        overlap = None if row is None else row.get("overlap_share")
        yield _at_least(f"{name}: overlap of the shorter side", "≥ 80 %", overlap, 0.80, "{:.0%}")


def dense_offloading(models: Sequence[Result], row: Result) -> list[float]:
    """Tokens per second of both ways to offload dense layers of the model of `row`."""
    alike = [other for other in models if (other["model"], other["quant"]) == (row["model"], row["quant"])]
    return [
        each["tokens_per_s"]
        for each in alike
        if each["variant"] in ("layers_dense", "copied") and "tokens_per_s" in each
    ]


def _at_least(what: str, wanted: str, found: float | None, least: float, form: str) -> Bar:
    return Bar(what, wanted, None if found is None else form.format(found), None if found is None else found >= least)


def _one(rows: Sequence[Result], **wanted: Any) -> Result | None:
    return next((row for row in rows if all(row.get(key) == value for key, value in wanted.items())), None)


def text_of(results: Result) -> str:
    """All tables, the bars last."""
    parts = [_kernel_table(results), _check_table(results), _model_table(results), _bar_table(results)]
    return "\n\n".join(part for part in (_heading(results), *parts) if part)


def _heading(results: Result) -> str:
    machine = results["machine"]
    if results["stand_in"]:
        return STAND_IN
    copy = f"{results['copy_bytes_per_s'] / 1e9:.0f} GB/s of copies within it" if results["copy_bytes_per_s"] else ""
    return ", ".join(filter(None, [machine["gpu"], f"CUDA {machine['driver']}", f"PyTorch {machine['torch']}", copy]))


def _table(columns: str, rows: list[str]) -> str:
    names = columns.split(", ")
    return "\n".join([f"| {' | '.join(names)} |", "|" + " --- |" * len(names), *rows]) if rows else ""


def _kernel_table(results: Result) -> str:
    rows = [
        f"| {row['label']} | {'' if row['share'] is None else format(row['share'], '.0%')} | {row['error']:.1e} "
        f"| {'yes' if row['is_right'] else 'NO'} | {_number(row.get('seconds'), 1e6)} "
        f"| {_number(row.get('bytes_per_s'), 1e-9)} | {_share(row.get('copy_share'))} |"
        for row in results["kernels"]
    ]
    table = _table("kernel, firing, error, right, µs, GB/s, of copies", rows)
    dense = [f"cuBLAS, {key} block of 4096x4096: {seconds * 1e6:.1f} µs" for key, seconds in results["cublas"].items()]
    return "\n".join([table, *([""] if dense else []), *dense])


def _check_table(results: Result) -> str:
    rows = [
        f"| {row['label']} | {row['computed']['all']:.1%} | {row['error']:.1e} | {row['limit']:.0e} "
        f"| {'yes' if row['is_right'] else 'NO'} |"
        for row in results["checks"]
    ]
    return _table("model, computed, error, limit, right", rows)


def _model_table(results: Result) -> str:
    rows = []
    for row in results["models"]:
        name = f"| {row['model']} {row['quant']} | {describe(row)} "
        if "tokens_per_s" not in row:
            rows.append(f"{name}| {row['reason']} | | | | | |")
            continue
        dense = dense_offloading(results["models"], row)
        ratio = f"{row['tokens_per_s'] / max(dense):.2f} ×" if dense else ""
        parts = row.get("computed", {})
        shares = ", ".join(f"{part} {parts[part]:.1%}" for part in ("all", "hot", "cold") if part in parts)
        gpu = _number(row.get("gpu_bytes"), 1e-9)
        rows.append(
            f"{name}| {row['tokens_per_s']:.2f} | {ratio} | {_number(row.get('prefill_tokens_per_s'), 1)} | {gpu} "
            f"| {shares} | {_share(row.get('overlap_share'))} |"
        )
    columns = "model, engine, tokens/s, of dense offloading, prompt tokens/s, GB on the GPU, computed, overlap"
    return _table(columns, rows)


def describe(row: Result) -> str:
    """What a row of models is, for people."""
    layers = row.get("resident_layers")
    return {
        "hybrid": f"hybrid, {row.get('hot')} neurons of each layer hot" + (", by policy" if row.get("skew") else ""),
        "layers": f"{layers} layers on the GPU, predictors and sparse operators",
        "layers_dense": f"{layers} layers on the GPU, dense, the others on the CPU",
        "copied": f"{layers} layers on the GPU, dense, the others copied"
        + ("" if row.get("computes", True) else " and not computed"),
        "cpu": "all on the CPU, sparse",
        "gpu": "all on the GPU, sparse",
    }[row["variant"]]


def _bar_table(results: Result) -> str:
    return _table("bar, wanted, found, met", [bar.row for bar in bars(results)])


def _number(value: float | None, factor: float) -> str:
    return "" if value is None else f"{value * factor:.1f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
