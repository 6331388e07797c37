"""The page: one HTML file of all sources, which loads nothing. The same sources give the same bytes."""

from collections.abc import Callable, Sequence
from pathlib import Path

import jinja2

from picompile.predictors import Predictors
from picompile.report.blocks import Section
from picompile.report.numbers import unbroken
from picompile.report.plan import PlanFacts
from picompile.report.profile import FiringProfile
from picompile.report.section_artifact import artifact_section
from picompile.report.section_plan import plan_section
from picompile.report.section_predictors import predictors_section
from picompile.report.section_profile import profile_section
from picompile.report.sources import Source
from picompile.report.summary import TEXTS, summary_row, without_empty


def render_report(sources: Sequence[Source], advance: Callable[[int], None] = lambda _: None) -> str:
    """The HTML of a report on `sources`, in their order. `advance` is told of each section that is drawn."""
    profiles = [source for source in sources if isinstance(source, FiringProfile)]
    sections = []
    for number, source in enumerate(sources, 1):
        sections.append(_section(f"s{number}", source, profiles))
        advance(1)
    columns, rows = without_empty([summary_row(f"s{number}", source) for number, source in enumerate(sources, 1)])
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["unbroken"] = unbroken
    template = environment.get_template("page.html.jinja")
    html = template.render(columns=columns, rows=rows, sections=sections, texts=TEXTS).lstrip()
    # Names of files need not be text.
    return html.encode("utf-8", "replace").decode("utf-8")


def _section(anchor: str, source: Source, profiles: Sequence[FiringProfile]) -> Section:
    if isinstance(source, FiringProfile):
        return profile_section(anchor, source)
    if isinstance(source, Predictors):
        return predictors_section(anchor, source, profiles)
    if isinstance(source, PlanFacts):
        return plan_section(anchor, source)
    return artifact_section(anchor, source)
