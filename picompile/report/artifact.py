"""The section of an artifact: its facts, the bytes of its weights, its parts, and its accuracy."""

from collections.abc import Mapping

from picompile.report import numbers
from picompile.report.artifact_facts import ArtifactFacts, accuracy_table
from picompile.report.comparison import comparison_table
from picompile.report.drawing import INK, SERIES, WIDTH, Canvas, drawable, picture
from picompile.report.numbers import NOTHING, UNFOLDED, PagePicture, PageSection, Part, Pictures, Table, size
from picompile.report.plan import plan_parts
from picompile.report.predictors import accuracy_pictures, kinds_text, layers_table

_OPERATORS = {
    "embedding": "embedding",
    "linear": "attention projections",
    "norm": "norms",
    "ffn_norm": "norms of neurons",
    "elementwise": "other arithmetic",
    "rotary": "rotary tables",
    "attention": "rotary tables",
    "predict": "predictors",
    "ffn": "feed-forward",
    "route": "routers",
    "head": "output head",
}
_MOST_BARS = 12


def bytes_picture(name: str, operator_bytes: Mapping[str, int]) -> PagePicture:
    """Return the picture of the weights' bytes, by the operator that reads them."""
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
    height = 90 + 26 * len(rows)
    return picture(
        paint, name, title="What the weights take", description=description, words=words, size=(WIDTH, height)
    )


def _title(operator: str) -> str:
    """Return the operator in words; an operator of a later version by its name, in characters that fonts have."""
    return _OPERATORS.get(operator) or drawable(operator)


_COLUMNS = ("layer", "part", "neurons", "experts", "predictor", "weights", "of the predictor")

_WORDS = "Measured on held-out text, with the predictors of all layers in place."


def artifact_section(anchor: str, artifact: ArtifactFacts) -> PageSection:
    """Return an artifact's section: distance from the checkpoint, accuracy check and per layer, bytes and parts."""
    manifest, accuracy = artifact.manifest, artifact.accuracy
    model = {name: manifest.model.get(name, NOTHING) for name in ("name", "layers", "hidden", "ffn", "activation")}
    facts = [
        ("model", str(model["name"])),
        ("shape", f"layers {model['layers']}, hidden {model['hidden']}, ffn {model['ffn']} ({model['activation']})"),
        ("weights", f"{manifest.quant}, {numbers.size(sum(artifact.operator_bytes.values()))}"),
        ("matrices", ", ".join(f"{count} in {drawable(form)}" for form, count in artifact.format_counts.items())),
        ("predictor", kinds_text([part.predictor for part in artifact.parts])),
        ("context", f"{manifest.context:,} tokens, cache in {manifest.kv_dtype}"),
        ("code", ", ".join(variant.isa for variant in manifest.code)),
        ("files", numbers.size(sum(entry.size_bytes for entry in manifest.files.values()))),
    ]
    layers = () if accuracy is None else accuracy.layers
    pictures = [*accuracy_pictures(anchor, layers), bytes_picture(f"{anchor}-bytes", artifact.operator_bytes)]
    parts: list[Part] = [Pictures(pictures), _parts_table(artifact)]
    if accuracy is not None and (costs := accuracy_table({**accuracy.figures, "text": accuracy.text}, layers)):
        parts.insert(0, costs)
    if artifact.comparison is not None and (compared := comparison_table(artifact.comparison)):
        parts.insert(0, compared)
    if layers:
        parts.append(layers_table(layers, _WORDS))
    if artifact.plan is not None:
        parts += plan_parts(anchor, artifact.plan)
    return PageSection(anchor, kind="artifact", name=str(artifact.path), facts=facts, parts=parts)


def _parts_table(artifact: ArtifactFacts) -> Table:
    rows, seen = [], set()
    for part in artifact.parts:
        # A predictor serves all parts of its layer, and is named once.
        predictor = None if part.layer in seen else artifact.predictor_bytes.get(part.layer)
        seen.add(part.layer)
        weights, of_predictor = numbers.size(part.weight_bytes), numbers.size(predictor)
        experts = f"{part.chosen} of {part.experts}" if part.experts else NOTHING
        rows.append((str(part.layer), part.part, f"{part.neurons:,}", experts, part.predictor, weights, of_predictor))
    texts = frozenset({"part", "experts", "predictor"})
    folded = len(rows) > UNFOLDED
    return Table("Feed-forward parts", _COLUMNS, rows, texts, folded=folded).without_empty()
