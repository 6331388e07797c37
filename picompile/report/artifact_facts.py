"""Facts of an artifact for the report: its parts, the bytes of its weights, and the accuracy of its predictors."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from picompile.placement.plan import Plan
from picompile.predictors.accuracy import rank_layers_by_error
from picompile.report import numbers
from picompile.report.layer_figures import LayerFigures, of_entry
from picompile.report.numbers import NOTHING, Table, measured, relative_change, whole
from picompile.report.plan import plan_of_report
from picompile_runtime import ArtifactError
from picompile_runtime.artifact.fields import Fields, parse_object
from picompile_runtime.artifact.manifest import Manifest, read_manifest

# The row of the statistics that a feed-forward call counts into is its place in the buffer.
_STATS_ROW_BYTES = 16


@dataclass(frozen=True)
class ReportedFfn:
    """A feed-forward block, or one of the parts it is computed in, and the bytes of its weights.

    In a mixture a token chooses `chosen` of `experts`, which have `neurons` together; without one both are 0.
    """

    layer: int
    part: str
    neurons: int
    predictor: str
    weight_bytes: int
    experts: int = 0
    chosen: int = 0


@dataclass(frozen=True)
class Accuracy:
    """The accuracy of the predictors: the `figures` of the accuracy check on `text`, and each layer's figures."""

    figures: Mapping[str, float | None]
    text: str
    layers: tuple[LayerFigures, ...]


@dataclass(frozen=True)
class ArtifactFacts:
    """The facts in manifest.json, program.json and report.json.

    `operator_bytes` are the bytes of weights by the operator that reads them, most first; `predictor_bytes` by layer.
    `format_counts` are how many matrices are in each weight format.
    `plan` is what the artifact was split by, if by any, and `comparison` what the report says of its distance from the
    checkpoint, if that was measured.
    """

    path: Path
    manifest: Manifest
    parts: tuple[ReportedFfn, ...]
    operator_bytes: Mapping[str, int]
    format_counts: Mapping[str, int]
    predictor_bytes: Mapping[int, int]
    accuracy: Accuracy | None
    plan: Plan | None
    comparison: Mapping[str, Any] | None = None


_SUMS = ("add", "receive")


class _Reader(NamedTuple):
    """The first reader of a tensor when a token is decoded; `row` is its row of the statistics."""

    operator: str
    layer: int | None = None
    row: int | None = None


def read_artifact(folder: Path) -> ArtifactFacts:
    """Read the small files of an artifact, not its weights. Raise `ArtifactError` for one that is not whole."""

    manifest = read_manifest(folder)
    try:
        program, report = (
            parse_object((folder / name).read_bytes(), str(folder / name)) for name in ("program.json", "report.json")
        )
    except OSError as error:
        raise ArtifactError(f"{folder}: incomplete ({error.strerror}); compile the model again") from error
    sizes = report.object("weight_bytes")
    readers = _readers(program)
    totals: Counter[_Reader] = Counter()
    for name in sizes.data:
        totals[readers.get(name, _Reader("other"))] += sizes.integer(name)
    operators, predictors, rows = Counter[str](), Counter[int](), Counter[int | None]()
    for reader, total in totals.items():
        operators[reader.operator] += total
        rows[reader.row] += total
        if reader.operator == "predict" and reader.layer is not None:
            predictors[reader.layer] += total
    parts = tuple(_part(entry, rows) for entry in report.objects("ffn"))
    accuracy = _accuracy(report.object("accuracy")) if report.data.get("accuracy") else None
    operator_bytes = dict(operators.most_common())
    compared = report.object("checkpoint_accuracy").data if report.data.get("checkpoint_accuracy") else None
    forms = report.object("weight_formats")
    counts = dict(Counter(forms.text(name) for name in forms.data).most_common())
    return ArtifactFacts(
        folder,
        manifest,
        parts,
        operator_bytes,
        format_counts=counts,
        predictor_bytes=predictors,
        accuracy=accuracy,
        plan=plan_of_report(report),
        comparison=compared,
    )


def _readers(program: Fields) -> dict[str, _Reader]:
    """Return the tensors that decoding a token reads."""
    found: dict[str, _Reader] = {}
    for call in program.object("functions").objects("decode"):
        operator, arguments = call.text("op"), call.objects("args")
        # The weights of a sum are those of the norm behind it.
        operator = "norm" if operator in _SUMS else operator
        layer = None if call.data.get("layer") is None else call.integer("layer")
        rows = [
            argument.data.get("offset", 0) // _STATS_ROW_BYTES
            for argument in arguments
            if argument.data.get("buffer") == "stats" and type(argument.data.get("offset", 0)) is int
        ]
        for argument in arguments:
            if "weight" in argument.data:
                found.setdefault(argument.text("weight"), _Reader(operator, layer, rows[0] if rows else None))
    return found


def _part(entry: Fields, row_bytes: Mapping[int | None, int]) -> ReportedFfn:
    return ReportedFfn(
        layer=entry.integer("layer"),
        part=entry.text("part"),
        neurons=entry.integer("neurons"),
        predictor=entry.text("predictor"),
        weight_bytes=row_bytes.get(entry.integer("stats_row"), 0),
        experts=entry.optional_integer("experts") or 0,
        chosen=entry.optional_integer("chosen") or 0,
    )


def _accuracy(entry: Fields) -> Accuracy:
    names = ("bound", "dense_perplexity", "perplexity", "relative_change", "tokens")
    rows = entry.objects("layers") if entry.data.get("layers") else []
    return Accuracy(
        figures={name: measured(entry.data.get(name)) for name in names},
        text=str(entry.data.get("text") or ""),
        layers=tuple(of_entry(row.integer("layer"), row.text("kind"), row.data) for row in rows),
    )


_NAMED_LAYERS = 8

_WORDS = (
    "Perplexity of held-out text, with every neuron computed (dense) and with those that the predictors choose. The "
    "bound is how far it may rise. Beyond it, the layers in which most is missed get larger predictors, round by round."
)


def accuracy_table(figures: Mapping[str, Any], layers: Sequence[LayerFigures]) -> Table | None:
    """Return the table of the accuracy check, None if nothing was measured; `layers` have the missed energy."""
    dense, perplexity = measured(figures.get("dense_perplexity")), measured(figures.get("perplexity"))
    if dense is None and perplexity is None:
        return None
    row = (
        numbers.perplexity(dense),
        numbers.perplexity(perplexity),
        numbers.change(relative_change(figures)),
        numbers.percent(measured(figures.get("bound")), 2),
        verdict(figures),
        numbers.count(whole(figures.get("rounds"))),
        _named(rank_layers_by_error({layer.layer: layer.missed_energy or 0.0 for layer in layers})),
        numbers.count(whole(figures.get("tokens"))),
        str(figures.get("text") or NOTHING),
    )
    return Table(
        "What it costs in accuracy",
        ("dense", "with predictors", "change", "bound", "met", "rounds", "most missed in layers", "tokens", "text"),
        [row],
        texts=frozenset({"met", "most missed in layers", "text"}),
        words=_WORDS,
    ).without_empty()


def verdict(figures: Mapping[str, Any]) -> str:
    """Return whether the change is within the bound."""
    change, bound = relative_change(figures), measured(figures.get("bound"))
    if change is None or bound is None:
        return NOTHING
    return "yes" if change <= bound else "no"


def _named(layers: Sequence[int]) -> str:
    """Return a few of the layers, and how many more there are."""
    more = f" and {len(layers) - _NAMED_LAYERS} more" if len(layers) > _NAMED_LAYERS else ""
    return ", ".join(map(str, layers[:_NAMED_LAYERS])) + more or NOTHING
