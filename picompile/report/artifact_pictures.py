"""Pictures of an artifact: what its weights take."""

from collections.abc import Mapping

from picompile.report.blocks import Picture
from picompile.report.drawing import INK, SERIES, WIDTH, Canvas, draw, drawable
from picompile.report.numbers import size

_OPERATORS = {
    "embedding": "embedding",
    "linear": "attention projections",
    "norm": "norms",
    "rotary": "rotary tables",
    "attention": "rotary tables",
    "predict": "predictors",
    "ffn": "feed-forward",
    "head": "output head",
}
_MOST_BARS = 12


def bytes_picture(name: str, operator_bytes: Mapping[str, int]) -> Picture:
    """Bytes of the weights by what reads them."""
    total = sum(operator_bytes.values()) or 1
    largest = list(operator_bytes.items())
    rows = [(_title(operator), taken) for operator, taken in largest[:_MOST_BARS]]
    if len(largest) > _MOST_BARS:
        rows.append(("the rest", sum(taken for _, taken in largest[_MOST_BARS:])))

    def paint(canvas: Canvas) -> None:
        axes = canvas.axes(x="share of all weights (%)", y="")
        places = range(len(rows))
        bars = axes.barh(places, [100 * taken / total for _, taken in rows], color=SERIES[0], height=0.7)
        axes.bar_label(bars, [size(taken) for _, taken in rows], padding=5, color=INK)
        axes.set_yticks(places, [title for title, _ in rows])
        for bar, (title, taken) in zip(bars, rows, strict=True):
            canvas.hover(bar, f"{title}: {size(taken)}")
        axes.set_xlim(0, 125 * max((taken for _, taken in rows), default=1) / total)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)

    words = (
        "Bytes of the packed weights by the operator that reads them. A matrix that embedding and output head share "
        "counts as embedding. Of the feed-forward weights a token reads those of the neurons that are computed, and "
        "whatever the predictor needs to tell which."
    )
    description = ", ".join(f"{title} {size(taken)}" for title, taken in rows) + "."
    title = "What the weights take"
    height = 90 + 26 * len(rows)
    return Picture(title, draw(paint, name=name, title=title, description=description, size=(WIDTH, height)), words)


def _title(operator: str) -> str:
    """The operator in words; one of a later version by its name, as far as fonts have it."""
    return _OPERATORS.get(operator) or drawable(operator)
