"""Print how far an artifact is from its checkpoint, with a line for each lossy part."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picompile.cli.tables import print_table

if TYPE_CHECKING:
    from rich.table import Table

# Each part is one line, even if the width of the terminal is not known.
_WIDTH = 130
_HEADINGS = ("perplexity", "change", "95 %", "adds", "KL, nats", "95 %", "adds", "same top")


def reported(artifact: Path) -> dict[str, dict[str, Any]]:
    """Return the objects of the artifact's report by name; none if the report cannot be read."""
    try:
        report = json.loads((artifact / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    fields = report if isinstance(report, dict) else {}
    return {name: value for name, value in fields.items() if isinstance(value, dict)}


def show_comparison(comparison: Mapping[str, Any]) -> None:
    """Print the comparison of an artifact with its checkpoint: what was read, and a table of the parts."""
    try:
        table, tokens = _table(comparison), f"{comparison['tokens']:,}"
    except (AttributeError, KeyError, TypeError, ValueError):
        print("accuracy against the checkpoint: cannot be read")
        return
    print(f"accuracy against the checkpoint, on {tokens} tokens of {comparison.get('text')}")
    print_table(table, _WIDTH)


def comparison_text(comparison: Mapping[str, Any]) -> str:
    """Return the figures of the whole artifact in one line, even if the report is damaged."""
    try:
        change, kl = comparison["relative_change"], comparison["kl_nats"]
        interval = _interval(comparison["relative_change_interval"], _percent)
        around = f" (95 %: {interval})" if interval else ""
        return f"perplexity {_percent(change)}{around} against the checkpoint, KL divergence {_nats(kl)} nats"
    except (AttributeError, KeyError, TypeError, ValueError):
        return "cannot be read"


def _table(comparison: Mapping[str, Any]) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("with", no_wrap=True)
    for title in _HEADINGS:
        table.add_column(title, justify="right", no_wrap=True)
    for row in _rows(comparison):
        table.add_row(*row)
    return table


def _rows(comparison: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    yield ("checkpoint in float32", _perplexity(comparison["checkpoint_perplexity"]), *[""] * 7)
    for line in comparison["lines"]:
        yield (
            f"+ {line['title']}",
            _perplexity(line["perplexity"]),
            _percent(line["relative_change"]),
            _interval(line["relative_change_interval"], _percent),
            _percent(line["added_change"]),
            _nats(line["kl_nats"]),
            _interval(line["kl_nats_interval"], _nats),
            _nats(line["added_kl_nats"], sign="+"),
            f"{line['same_top_share']:.2%}".replace("%", " %"),
        )


def _perplexity(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:+.3f} %"


def _nats(value: float | None, sign: str = "") -> str:
    return "–" if value is None else f"{value:{sign}.6f}"


def _interval(ends: Any, text: Any) -> str:
    """Return the two ends of an interval, with a unit once; nothing where there is no interval."""
    if ends is None:
        return ""
    low, high = ends
    return f"{text(low).removesuffix(' %')} to {text(high)}"
