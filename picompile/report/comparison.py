"""The table that compares an artifact with its checkpoint: the cost of each lossy part."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from picompile.report import numbers
from picompile.report.numbers import NOTHING, Table, measured

_Line = Mapping[str, Any]

_WORDS = (
    "The checkpoint in float32, and then with one lossy part after another, on {tokens} tokens of {text}. KL is the "
    "mean divergence of the next-token distributions from the checkpoint's. Intervals are of 95 % confidence, from "
    "paired differences in blocks of neighbouring tokens."
)


def comparison_table(comparison: Mapping[str, Any]) -> Table | None:
    """Return the table of a report's comparison with the checkpoint; None where it has no lines."""
    lines = comparison.get("lines")
    known = [line for line in lines if isinstance(line, dict)] if isinstance(lines, list) else []
    if not known:
        return None
    reference = {"perplexity": comparison.get("checkpoint_perplexity")}
    tokens = numbers.count(numbers.whole(comparison.get("tokens")))
    words = _WORDS.format(tokens=tokens, text=str(comparison.get("text") or "held-out text"))
    columns = {"with": lambda line: "checkpoint in float32" if line is reference else _title(line), **_COLUMNS}
    title = "What it costs against the checkpoint"
    return Table.of(title, [reference, *known], columns, frozenset({"with"}), words).without_empty()


def _title(line: _Line) -> str:
    return f"+ {line.get('title') or line.get('part') or NOTHING}"


def _nats(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.6f}".replace("-", "−")


def _interval(ends: object, text: Any) -> str:
    if not isinstance(ends, Sequence) or len(ends) != 2 or None in (low_high := tuple(map(measured, ends))):
        return NOTHING
    low, high = low_high
    return f"{text(low)} to {text(high)}"


_COLUMNS: Mapping[str, Callable[[_Line], str]] = {
    "perplexity": lambda line: numbers.perplexity(measured(line.get("perplexity"))),
    "change": lambda line: numbers.change(measured(line.get("relative_change"))),
    "95 %": lambda line: _interval(line.get("relative_change_interval"), numbers.change),
    "adds": lambda line: numbers.change(measured(line.get("added_change"))),
    "KL, nats": lambda line: _nats(measured(line.get("kl_nats"))),
    "95 % of KL": lambda line: _interval(line.get("kl_nats_interval"), _nats),
    "adds to KL": lambda line: _nats(measured(line.get("added_kl_nats"))),
    "same top token": lambda line: numbers.percent(numbers.share(line.get("same_top_share")), 2),
}
