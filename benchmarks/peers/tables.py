"""The results of `benchmarks.peers` as Markdown."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.script import heading
from benchmarks.script import row as line

Results = Mapping[str, Any]
_SWEPT = {"context": "tokens in the cache", "batch": "sequences"}
_ALONE = {"decode": "Decoding", "prefill": "Reading a prompt"}


def tables(groups: Sequence[Results]) -> str:
    """All tables, of the sweeps that were measured."""
    parts: list[str] = []
    for sweep, title in _ALONE.items():
        if rows := [group for group in groups if group["sweep"] == sweep]:
            parts += [f"### {title}: {rows[0]['model']}", "", *_contenders(rows), ""]
    for sweep, name in _SWEPT.items():
        for format in ("q4", "f16"):
            rows = [group for group in groups if (group["sweep"], group["format"]) == (sweep, format)]
            if rows:
                shape = rows[0]["model"].rpartition("-")[0]
                parts += [f"### Decoding by {name}, {format}: {shape}", "", *_swept(rows, name), ""]
    return "\n".join([*parts, *_notes(groups)])


def speed(result: Results) -> float:
    """Median tokens/s of a contender."""
    return float(statistics.median(result["tokens_per_s"]))


def peer(group: Results) -> float | None:
    """The speed of the group's llama.cpp, if it took part."""
    return next((speed(row) for row in group["results"].values() if row["engine"] == "llama.cpp"), None)


def _contenders(groups: Sequence[Results]) -> Iterator[str]:
    measured = ("tokens/s", "least – most", "of llama.cpp", "MB a token", "of bandwidth", "computed")
    yield heading("contender", "threads", *measured)
    for group in groups:
        for label, row in group["results"].items():
            spread = f"{min(row['tokens_per_s']):.1f} – {max(row['tokens_per_s']):.1f}"
            threads = str(group["task"]["threads"])
            yield line(label, threads, f"{speed(row):.1f}", spread, _ratio(row, group), *_bytes(row, group))


def _bytes(row: Results, group: Results) -> Iterator[str]:
    """Yield a token's bytes, their share of the bandwidth, and the share of neurons computed; empty if not known."""
    needed, computed = row["facts"].get("bytes_per_token"), row["facts"].get("computed_share")
    bandwidth = group["bandwidth_bytes_per_s"]
    yield f"{needed / 1e6:.0f}" if needed else ""
    yield f"{needed * speed(row) / statistics.median(bandwidth):.0%}" if needed and bandwidth else ""
    yield f"{computed:.1%}" if computed is not None else ""


def _swept(groups: Sequence[Results], name: str) -> Iterator[str]:
    """A row for each x; every contender's speed, and ours against llama.cpp's."""
    labels = list(dict.fromkeys(label for group in groups for label in group["results"]))
    yield heading(name, *(f"{label}, tokens/s" for label in labels), "of llama.cpp")
    for group in groups:
        cells = [str(group["x"])]
        for label in labels:
            row = group["results"].get(label)
            cells.append(f"{speed(row):.1f}" if row else "")
        ours = next((row for row in group["results"].values() if row["engine"] == "picompile"), None)
        yield line(*cells, _ratio(ours, group) if ours else "")


def _ratio(row: Results, group: Results) -> str:
    base = peer(group)
    return f"{speed(row) / base:.2f} ×" if base else ""


def _notes(groups: Sequence[Results]) -> Iterator[str]:
    for threads in sorted({group["task"]["threads"] for group in groups}):
        of_threads = (group for group in groups if group["task"]["threads"] == threads)
        if found := [value / 1e9 for group in of_threads for value in group["bandwidth_bytes_per_s"]]:
            median, least, most = statistics.median(found), min(found), max(found)
            yield f"- Memory, {threads} threads: {median:.1f} GB/s in the median, {least:.1f} to {most:.1f}."
    versions = {row["engine"]: row["about"] for group in groups for row in group["results"].values()}
    for about in versions.values():
        yield f"- {about['version']}: {about['system']}"
    left_out = {f"{label}: {why}" for group in groups for label, why in group["left_out"].items()}
    yield from (f"- Left out: {line}" for line in sorted(left_out))
