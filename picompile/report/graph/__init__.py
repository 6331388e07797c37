"""The changes that a pass made to a graph, from two dumps: as a list, and as pictures on a page, without torch."""

from picompile.report.graph.changes import Change, Comparison, compare
from picompile.report.graph.listing import Line, changes_json, counts_text, graph_summary, listing
from picompile.report.graph.page import Compared, render_page

__all__ = [
    "Change",
    "Compared",
    "Comparison",
    "Line",
    "changes_json",
    "compare",
    "counts_text",
    "graph_summary",
    "listing",
    "render_page",
]
