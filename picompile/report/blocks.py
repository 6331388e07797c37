"""What a page consists of: sections, each with facts, pictures and tables. The template knows no more than this."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from markupsafe import Markup

# More pictures or rows than these are folded.
UNFOLDED = 12


@dataclass(frozen=True)
class Picture:
    """One picture, and what it shows in plain words."""

    title: str
    svg: Markup
    words: str


@dataclass(frozen=True)
class Pictures:
    """Pictures side by side where the page is wide enough, more of them if they are `small`.

    With `folded` they are behind a line that opens them.
    """

    form: ClassVar[str] = "pictures"
    pictures: Sequence[Picture]
    title: str = ""
    words: str = ""
    small: bool = False
    folded: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of text below a head. A column holds words if its name is in `texts`, else numbers, flush right."""

    form: ClassVar[str] = "table"
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: frozenset[str] = frozenset()
    words: str = ""
    folded: bool = False

    def without_empty(self, nothing: str) -> "Table":
        """The same without columns that hold `nothing` in every row."""
        kept = [i for i, _ in enumerate(self.columns) if any(row[i] != nothing for row in self.rows)]
        columns = [self.columns[i] for i in kept]
        rows = [[row[i] for i in kept] for row in self.rows]
        return Table(self.title, columns, rows, self.texts, self.words, self.folded)


Part = Pictures | Table


@dataclass(frozen=True)
class Section:
    """All about one source. `facts` are names and values; `anchor` is what the summary links to."""

    anchor: str
    kind: str
    name: str
    facts: Sequence[tuple[str, str]]
    parts: Sequence[Part]
