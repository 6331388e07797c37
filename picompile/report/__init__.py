"""Pictures of profiles, predictors, artifacts and plans, on one page that works offline.

    sources = read_sources([Path("build/profile"), Path("build/predictors"), Path("build/artifact")])
    Path("report.html").write_text(render_report(sources), encoding="utf-8")

The figures of a profile are there without the page: `firing_curve`, `share_for` and `summarize`.

Names are resolved on first use: to compare dumps of graphs (`picompile.report.graph`) takes no torch.
"""

from typing import TYPE_CHECKING

from picompile.lazy import lazy

if TYPE_CHECKING:
    from picompile.report.drawing import require_matplotlib
    from picompile.report.page import Source, read_sources, render_report
    from picompile.report.profile import FiringSummary, firing_curve, share_for, summarize

__all__ = [
    "FiringSummary",
    "Source",
    "firing_curve",
    "read_sources",
    "render_report",
    "require_matplotlib",
    "share_for",
    "summarize",
]

_HOME = {
    "FiringSummary": ".profile",
    "Source": ".page",
    "firing_curve": ".profile",
    "read_sources": ".page",
    "render_report": ".page",
    "require_matplotlib": ".drawing",
    "share_for": ".profile",
    "summarize": ".profile",
}

__getattr__ = lazy(__name__, _HOME)
