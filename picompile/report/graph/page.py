"""The page: one HTML file with the pictures of two graphs side by side, section by section. It loads nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from picompile.report.graph import picture
from picompile.report.graph.changes import HEAD, TAIL, Comparison, section_title
from picompile.report.graph.listing import Fold, Line, counts, fold, layers_text, listing, sizes_text, weights_in
from picompile.report.graph.picture import Panel
from picompile.report.shell import render
from picompile_passes.graph.dump_reader import DumpGraph

_MOST_UNEQUAL = 2.0


@dataclass(frozen=True)
class Compared:
    """Two dumps that a page shows, and their names."""

    before_name: str
    after_name: str
    comparison: Comparison


@dataclass(frozen=True)
class Cell:
    """A node of a folded layer: its name and what happened to it."""

    name: str
    status: str


@dataclass(frozen=True)
class FoldTable:
    """The names of the nodes in the layers that are not drawn: for each node that is, its counterparts.

    `sizes` says of each layer what is other in it.
    """

    layers: tuple[int, ...]
    sizes: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]


@dataclass(frozen=True)
class Half:
    """A section of one graph; `names` are the node names in layers like it."""

    picture: picture.Picture
    names: FoldTable


@dataclass(frozen=True)
class GraphSection:
    """A section of both graphs: the head, the tail, or a layer, which may stand for others."""

    title: str
    before: Half
    after: Half
    folded: str


@dataclass(frozen=True)
class ShownGraph:
    """All that the page says of one comparison."""

    before_name: str
    after_name: str
    before: DumpGraph
    after: DumpGraph
    before_weights: int
    after_weights: int
    counts: dict[str, int]
    sections: tuple[GraphSection, ...]
    lines: tuple[Line, ...]

    @property
    def widths(self) -> tuple[float, float]:
        """The two sides' shares of the page's width, with which both are drawn at one scale."""
        before = max((section.before.picture.width for section in self.sections), default=1.0)
        after = max((section.after.picture.width for section in self.sections), default=1.0)
        return max(before, after / _MOST_UNEQUAL), max(after, before / _MOST_UNEQUAL)


def render_page(compared: Sequence[Compared]) -> str:
    """Return the HTML of a page with the pictures of `compared`, one below the other."""
    title = f"{compared[0].before_name} → {compared[-1].after_name}" if compared else "no difference"
    return render("graph", "diff", title, comparisons=[_shown(item) for item in compared], size=picture)


def _shown(compared: Compared) -> ShownGraph:
    comparison = compared.comparison
    before, after = comparison.before, comparison.after
    return ShownGraph(
        compared.before_name,
        compared.after_name,
        before,
        after,
        weights_in(before),
        weights_in(after),
        counts(comparison),
        tuple(_sections(comparison)),
        tuple(listing(comparison)),
    )


def _sections(comparison: Comparison) -> Iterator[GraphSection]:
    panels = Panel(comparison, after=False), Panel(comparison, after=True)
    folds = fold(comparison, whole=True)
    for shown in (Fold(HEAD, {}), *folds, Fold(TAIL, {})):
        before, after = (Half(picture.draw(panel, shown.shown), _table(panel, shown)) for panel in panels)
        if before.picture.boxes or after.picture.boxes:
            yield GraphSection(section_title(shown.shown) if folds else "", before, after, _fold_text(shown))


def _fold_text(shown: Fold) -> str:
    if not shown.alike:
        return ""
    other = ", with other sizes" if any(shown.sizes.values()) else ""
    return f"{layers_text(shown.alike)}: as layer {shown.shown}{other}"


def _table(panel: Panel, shown: Fold) -> FoldTable:
    names: dict[int, list[str]] = {layer: [] for layer in (shown.shown, *shown.alike)}
    for name, layer in panel.section.items():
        if layer in names:
            names[layer].append(name)
    first, *others = names.values()
    rows = zip(first, *others, strict=True)
    return FoldTable(
        shown.alike,
        tuple(map(sizes_text, shown.sizes.values())),
        tuple((row[0], tuple(Cell(name, panel.status(name)) for name in row[1:])) for row in rows),
    )
