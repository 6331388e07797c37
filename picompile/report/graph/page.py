"""The page of two graphs side by side, with a row for each node: one HTML file, which loads nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest

from picompile.report.graph.changes import CHANGED, HEAD, REMOVED, SAME, TAIL, Comparison, Side, section_title
from picompile.report.graph.listing import (
    Fold,
    became_text,
    change_text,
    counts,
    fold,
    fold_texts,
    graph_summary,
    node_text,
)
from picompile.report.shell import render


@dataclass(frozen=True)
class Compared:
    """Two dumps that a page shows, and their names."""

    before_name: str
    after_name: str
    comparison: Comparison


@dataclass(frozen=True)
class Cell:
    """One node of one graph: its name, its line in the dump, and what became of it or changed in it."""

    name: str
    text: str
    status: str
    change: str
    is_weight: bool

    @property
    def key(self) -> tuple[str, bool]:
        """The key of a row is the same for both cells of a node that is in both graphs."""
        return self.name, self.status in (SAME, CHANGED)


Row = tuple[Cell | None, Cell | None]


@dataclass(frozen=True)
class GraphSection:
    """The head, the tail, or a layer of both graphs; `alike` names the layers that it stands for."""

    title: str
    alike: tuple[str, ...]
    rows: tuple[Row, ...]


def render_page(compared: Sequence[Compared]) -> str:
    """Return the HTML of a page with the graphs of `compared`, one pair below the other."""
    title = f"{compared[0].before_name} → {compared[-1].after_name}" if compared else "no difference"
    shown = [
        {
            "names": (item.before_name, item.after_name),
            "summaries": (graph_summary(item.comparison.before), graph_summary(item.comparison.after)),
            "counts": counts(item.comparison),
            "sections": list(_sections(item.comparison)),
        }
        for item in compared
    ]
    return render("graph", "diff", title, comparisons=shown)


def _sections(comparison: Comparison) -> Iterator[GraphSection]:
    before, after = (_cells(Side(comparison, after=is_after)) for is_after in (False, True))
    folds = fold(comparison, whole=True)
    for shown in (Fold(HEAD, {}), *folds, Fold(TAIL, {})):
        rows = tuple(_rows(before.get(shown.shown, []), after.get(shown.shown, [])))
        if rows:
            yield GraphSection(section_title(shown.shown) if folds else "", tuple(fold_texts(shown)), rows)


def _cells(side: Side) -> dict[int, list[Cell]]:
    """Return the cells of each section in the order of the graph, but weights, most of the nodes, come last."""
    found: dict[int, list[Cell]] = {}
    for name, section in side.section.items():
        node, status, change = side.graph.nodes[name], side.status(name), ""
        if status == CHANGED:
            change = change_text(side.comparison.changed[name])
        elif status == REMOVED:
            change = became_text(side.comparison, name)
        found.setdefault(section, []).append(
            Cell(name, text=node_text(node), status=status, change=change, is_weight=node.operator == "weight")
        )
    return {section: sorted(cells, key=lambda cell: cell.is_weight) for section, cells in found.items()}


def _rows(before: Sequence[Cell], after: Sequence[Cell]) -> Iterator[Row]:
    """Yield the cells of a section in pairs: a node that is in both graphs faces itself, others what took their place.

    Of nodes whose order differs, those face themselves that are in order.
    """
    matcher = SequenceMatcher(None, [cell.key for cell in before], [cell.key for cell in after], autojunk=False)
    for _, first, last, other_first, other_last in matcher.get_opcodes():
        yield from zip_longest(before[first:last], after[other_first:other_last])
