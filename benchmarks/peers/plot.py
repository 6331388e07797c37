"""The results as a picture: decoding at the base point, and by context and sequences."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.tables import speed

Results = Mapping[str, Any]
# By what a label begins with.
_COLORS = {
    "picompile q4": "#1f6fb4", "picompile f16": "#8ab8dd", "llama.cpp q4_0": "#c4541c", "llama.cpp f16": "#e8a87c",
    "PowerInfer": "#8a5fb0", "OpenVINO": "#3a8a4d", "torch": "#777777",
}  # fmt: skip
_SWEPT = {
    "context": "tokens in the cache",
    "batch": "sequences at a time",
}


def plot(groups: Sequence[Results], file: Path) -> None:
    """Panels of the sweeps that were measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    swept = [sweep for sweep in _SWEPT if any(group["sweep"] == sweep for group in groups)]
    bars = [group for group in groups if group["sweep"] == "decode" and group["task"]["threads"] == 2]
    panels = (["decode"] if bars else []) + swept
    if not panels:
        return
    rows, columns = (len(panels) + 1) // 2, min(2, len(panels))
    figure, grid = plt.subplots(rows, columns, figsize=(5.0 * columns, 3.9 * rows), layout="constrained", squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        if panel == "decode":
            _bars(axes, bars)
        else:
            _lines(axes, [group for group in groups if group["sweep"] == panel], panel)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)


def _bars(axes: Any, groups: Sequence[Results]) -> None:
    rows = [(label, row) for group in groups for label, row in group["results"].items()]
    speeds = [speed(row) for _, row in rows]
    places = range(len(rows), 0, -1)
    spread = [
        [value - min(row["tokens_per_s"]) for value, (_, row) in zip(speeds, rows, strict=True)],
        [max(row["tokens_per_s"]) - value for value, (_, row) in zip(speeds, rows, strict=True)],
    ]
    colors = [_color(label) for label, _ in rows]
    axes.barh(places, speeds, xerr=spread, color=colors, error_kw={"linewidth": 0.8, "ecolor": "#333333"})
    axes.set_yticks(places, [label for label, _ in rows], fontsize=8)
    most = max(max(row["tokens_per_s"]) for _, row in rows)
    for place, value, (_, row) in zip(places, speeds, rows, strict=True):
        axes.text(max(row["tokens_per_s"]) + most * 0.02, place, f"{value:.1f}", va="center", fontsize=8)
    axes.set(xlabel="tokens/s", xlim=(0, most * 1.15), title=f"{groups[0]['model']}, 2 threads")
    axes.grid(axis="x", alpha=0.3, linewidth=0.5)
    axes.set_axisbelow(True)


def _lines(axes: Any, groups: Sequence[Results], sweep: str) -> None:
    labels = dict.fromkeys(label for group in groups for label in group["results"])
    for label in labels:
        points = [(group["x"], speed(group["results"][label])) for group in groups if label in group["results"]]
        style = "o-" if label.startswith("picompile") else "s--"
        axes.plot(*zip(*points, strict=True), style, color=_color(label), label=label, markersize=4)
    values = sorted({group["x"] for group in groups})
    axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()
    axes.set(xlabel=_SWEPT[sweep], ylabel="tokens/s, all sequences" if sweep == "batch" else "tokens/s", ylim=(0, None))
    axes.grid(alpha=0.3, linewidth=0.5)
    axes.legend(fontsize=8, frameon=False)


def _color(label: str) -> str:
    return next((color for name, color in _COLORS.items() if label.startswith(name)), "#999999")
