"""Pictures of the measurements of a training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

_COLOURS = {"library": "#1f6feb", "own": "#d1700f"}
_NAMES = {"library": "held-out library", "own": "text of the model's own"}


def plot(measurements: Mapping[str, Any], image: Path) -> None:
    """Draw divergence, perplexity and firing over the tokens that were read, and firing by layer."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    records = measurements["records"]
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    (kl, perplexity), (firing, layers) = figure.subplots(2, 2)
    tokens = [record["tokens"] / 1000 for record in records]
    for name in records[0]["text"]:
        found = [record["text"][name] for record in records]
        style: dict[str, Any] = {"color": _COLOURS.get(name), "label": _NAMES.get(name, name), "marker": "o"}
        kl.plot(tokens, [one["kl"] for one in found], **style)
        perplexity.plot(tokens, [math.exp(one["loss"]) for one in found], **style)
        perplexity.axhline(math.exp(found[-1]["original_loss"]), color=style["color"], linestyle=(0, (4, 3)))
        firing.plot(tokens, [100 * sum(one["firing"]) / len(one["firing"]) for one in found], **style)
    for axes, label in ((kl, "KL to the original, nats a token"), (perplexity, "perplexity (dashed: the original's)")):
        axes.set(yscale="log", ylabel=label)
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    firing.set(ylim=(0, 1.05 * firing.get_ylim()[1]), ylabel="neurons firing per token (%)")
    for axes in (kl, perplexity, firing):
        axes.set_xlabel("thousand tokens read")
        axes.grid(alpha=0.3, which="both")
        for before, record in pairwise(records):
            if before["stage"] != "model" and record["stage"] == "model":
                axes.axvline(before["tokens"] / 1000, color="grey", linewidth=1)
    kl.legend(frameon=False)
    _draw_layers(layers, records)
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=110, facecolor="white", metadata={"Software": None})


def _draw_layers(axes: Any, records: list[dict[str, Any]]) -> None:
    first, last = (records[place]["text"]["library"]["firing"] for place in (0, -1))
    axes.bar(range(len(last)), [100 * share for share in last], color=_COLOURS["library"], label="at the end")
    axes.plot(range(len(first)), [100 * share for share in first], ".", color="black", label="ReLU for SiLU, untrained")
    axes.set(xlabel="layer", ylabel="neurons firing per token (%)")
    axes.legend(frameon=False)
