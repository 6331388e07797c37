"""Pictures of profiles, predictors, artifacts and plans, on one page that works offline.

    sources = read_sources([Path("build/profile"), Path("build/predictors"), Path("build/artifact")])
    Path("report.html").write_text(render_report(sources), encoding="utf-8")

The figures of a profile are there without the page: `firing_curve`, `share_for` and `summarize`.
"""

from picompile.report.drawing import require_matplotlib
from picompile.report.firing import Firing, firing_curve, share_for, summarize
from picompile.report.page import render_report
from picompile.report.sources import Source, read_sources

__all__ = [
    "Firing",
    "Source",
    "firing_curve",
    "read_sources",
    "render_report",
    "require_matplotlib",
    "share_for",
    "summarize",
]
