"""The report: recognize and read its sources, summarize them in a table, and render the page."""

from collections.abc import Callable, Sequence
from pathlib import Path

from picompile.errors import UsageError
from picompile.placement.plan import Plan
from picompile.predictors.files import load_predictors
from picompile.predictors.store import Predictors
from picompile.report import numbers
from picompile.report.artifact import artifact_section
from picompile.report.artifact_facts import ArtifactFacts, read_artifact
from picompile.report.layer_figures import LayerFigures, of_predictors, parameters_text
from picompile.report.numbers import PageSection, Table, relative_change
from picompile.report.plan import PlanFacts, gain_text, is_json_object, plan_section, read_plan_facts, taken_text
from picompile.report.plan_pictures import hot_shares
from picompile.report.predictors import predictors_section
from picompile.report.profile import FiringProfile, profile_section, read_profile
from picompile.report.shell import render

Source = FiringProfile | Predictors | ArtifactFacts | PlanFacts

_WANTED = (
    "give a profile (profile.json), predictors (predictors.json), an artifact (manifest.json) or the file of a plan"
)


def read_sources(paths: Sequence[Path]) -> list[Source]:
    """Read the sources. Raise `UsageError` for anything else, `ArtifactError` for a broken artifact."""
    # All are recognized before the first is read.
    recognized = [(path, _reader(path)) for path in paths]
    return [read(path) for path, read in recognized]


def _reader(path: Path) -> Callable[[Path], Source]:
    if not path.exists():
        raise UsageError(f"{path}: no such folder or file; {_WANTED}")
    if path.is_file() and is_json_object(path):
        return read_plan_facts
    if not path.is_dir():
        raise UsageError(f"{path}: neither a folder nor a plan; {_WANTED}")
    markers = [marker for marker in _READERS if (path / marker).is_file()]
    if not markers:
        raise UsageError(f"{path}: holds none of {', '.join(_READERS)}; {_WANTED}")
    if len(markers) > 1:
        raise UsageError(f"{path}: holds {' and '.join(markers)}, so which is meant is not clear; give one folder each")
    return _READERS[markers[0]]


_READERS: dict[str, Callable[[Path], Source]] = {
    "profile.json": read_profile,
    "predictors.json": load_predictors,
    "manifest.json": read_artifact,
}


# The table at the top of a report: a row for each source, so that several of one kind can be compared.


COLUMNS = (
    "model",
    "predictor",
    "fire",
    "make 80 %",
    "parameters",
    "size",
    "computed / fire",
    "recall",
    "by contribution",
    "precision",
    "dense perplexity",
    "with predictors",
    "change",
    "planned for",
    "on the GPU",
    "predicted tokens/s",
    "against layers-first",
    "GPU memory",
    "host memory",
)
TEXTS = frozenset({"model", "predictor", "planned for"})


def _cells(source: Source) -> dict[str, str]:
    """Return what is known of a source, by columns of the summary."""
    if isinstance(source, FiringProfile):
        return _profile(source)
    if isinstance(source, Predictors):
        return _predictors(source)
    if isinstance(source, PlanFacts):
        return {"model": source.plan.model, "predictor": source.plan.predictor, **_plan(source.plan)}
    return _artifact(source)


def _profile(source: FiringProfile) -> dict[str, str]:
    model = source.model_figures()
    return {
        "model": source.of.model_name,
        "fire": numbers.percent(model.firing_share),
        "make 80 %": numbers.percent(model.neurons_for_80_percent),
    }


def _predictors(source: Predictors) -> dict[str, str]:
    layers = of_predictors(source)
    return {
        "model": str(source.name or numbers.NOTHING),
        "predictor": _kinds([layer.kind for layer in layers]),
        "parameters": parameters_text(source, brief=True),
        "size": numbers.size(sum(layer.bytes_f16 or 0 for layer in layers) or None),
        **_layers(layers),
        "dense perplexity": numbers.perplexity(numbers.measured(source.accuracy.get("dense_perplexity"))),
        "with predictors": numbers.perplexity(numbers.measured(source.accuracy.get("perplexity"))),
        "change": numbers.change(relative_change(source.accuracy)),
    }


def _artifact(source: ArtifactFacts) -> dict[str, str]:
    figures = source.accuracy.figures if source.accuracy else {}
    model = source.manifest.model
    return {
        "model": str(model.get("name", numbers.NOTHING)),
        "predictor": _kinds([part.predictor for part in source.parts]),
        "size": numbers.size(sum(source.predictor_bytes.values()) or None),
        **_layers(source.accuracy.layers if source.accuracy else ()),
        "dense perplexity": numbers.perplexity(figures.get("dense_perplexity")),
        "with predictors": numbers.perplexity(figures.get("perplexity")),
        "change": numbers.change(relative_change(figures)),
        **({} if source.plan is None else _plan(source.plan)),
    }


def _plan(plan: Plan) -> dict[str, str]:
    return {
        "planned for": plan.target,
        "on the GPU": numbers.percent(hot_shares(plan)[0]),
        "predicted tokens/s": numbers.rate(plan.tokens_per_s),
        "against layers-first": gain_text(plan, "layers-first"),
        "GPU memory": taken_text(plan, "accelerator"),
        "host memory": taken_text(plan, "host"),
    }


def _layers(layers: Sequence[LayerFigures]) -> dict[str, str]:
    """Return the figures of all layers together: recall of all firings, precision of all computed neurons."""
    fired = _mean(layers, lambda layer: layer.firing_share)
    computed = _mean(layers, lambda layer: layer.computed_share)
    kept = _mean(layers, lambda layer: _product(layer.recall, layer.firing_share))
    return {
        "fire": numbers.percent(fired),
        "recall": numbers.recall(numbers.ratio(kept, fired)),
        "by contribution": numbers.recall(_mean(layers, lambda layer: layer.weighted_recall)),
        "precision": numbers.percent(numbers.ratio(kept, computed)),
        "computed / fire": numbers.times(numbers.ratio(computed, fired)),
    }


def _mean(layers: Sequence[LayerFigures], of: Callable[[LayerFigures], float | None]) -> float | None:
    """Return the mean over layers; None where one of them was not measured."""
    values = [of(layer) for layer in layers]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _product(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a * b


def _kinds(kinds: Sequence[str]) -> str:
    return ", ".join(sorted(set(kinds))) or numbers.NOTHING


# The page: one HTML file of all sources, which loads nothing. The same sources give the same bytes.


def render_report(sources: Sequence[Source], advance: Callable[[int], None] = lambda _: None) -> str:
    """Return the HTML of a report on `sources`, in their order. Calls `advance` for each section that is drawn."""
    profiles = [source for source in sources if isinstance(source, FiringProfile)]
    sections = []
    for number, source in enumerate(sources, 1):
        sections.append(_section(f"s{number}", source, profiles))
        advance(1)
    cells = [[known.get(column, numbers.NOTHING) for column in COLUMNS] for known in map(_cells, sources)]
    summary = Table("summary", COLUMNS, cells, TEXTS).without_empty()
    return render("report", "report", "picompile report", summary=summary, sections=sections)


def _section(anchor: str, source: Source, profiles: Sequence[FiringProfile]) -> PageSection:
    if isinstance(source, FiringProfile):
        return profile_section(anchor, source)
    if isinstance(source, Predictors):
        return predictors_section(anchor, source, profiles)
    if isinstance(source, PlanFacts):
        return plan_section(anchor, source)
    return artifact_section(anchor, source)
