"""Formats of numbers in the report; a dash stands for what was not measured."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, log10
from typing import Any, ClassVar, TypeVar

from markupsafe import Markup

NOTHING = "–"

_Item = TypeVar("_Item")

# Between a number and its unit no line ends.
_SPACE = "\u00a0"

# No figure of ours comes near; a damaged file's would fill the page with digits.
_LARGEST = 1e18


def percent(share: float | None, digits: int = 1) -> str:
    """`0.1234 → 12.3 %`."""
    return NOTHING if share is None else f"{100 * share:.{digits}f}{_SPACE}%"


def recall(share: float | None) -> str:
    """Return a share near one, with as many digits as tell it from one: `99.53 %`, `99.991 %`."""
    if share is None:
        return NOTHING
    missed = 100 * (1 - share)
    digits = 2 if missed <= 0 else min(max(-floor(log10(missed)), 2), 4)
    return percent(share, digits)


def change(share: float | None) -> str:
    """Return a relative change with its sign: `+0.084 %`."""
    return NOTHING if share is None else f"{100 * share:+.3f}{_SPACE}%".replace("-", "−")


def times(ratio: float | None) -> str:
    """`1.42 ×`."""
    return NOTHING if ratio is None else f"{ratio:.2f}{_SPACE}×"


def count(number: int | None) -> str:
    """`12,345`."""
    return NOTHING if number is None else f"{number:,}"


def counted(number: int, thing: str) -> str:
    """`1 layer`, `12,345 layers`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def decimal(number: float | None) -> str:
    """Return a number with four significant digits."""
    return NOTHING if number is None else f"{number:.4g}".replace("-", "−")


def perplexity(value: float | None) -> str:
    """Return a perplexity as `picompile eval` prints it."""
    return NOTHING if value is None else f"{value:.4f}"


def measured(value: object) -> float | None:
    """Return `value` if it is a measured number; None for NaN, infinity, a number that is too large, text, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST <= value <= _LARGEST:
        return None
    return float(value)


def share(value: object) -> float | None:
    """Return a measured share: from 0 to 1, within the rounding of sums."""
    known = measured(value)
    return None if known is None or not -1e-6 <= known <= 1 + 1e-6 else min(max(known, 0.0), 1.0)


def whole(value: object) -> int | None:
    """Return a measured count, or None if it is not a count."""
    known = measured(value)
    return None if known is None or known < 0 else int(known)


def from_text(text: str) -> float | None:
    """Return the number that a key of a JSON object means."""
    try:
        return measured(float(text))
    except ValueError:
        return None


def unbroken(text: str) -> str:
    """Return a sentence in which no line ends before a percent sign."""
    return text.replace(" %", f"{_SPACE}%")


def ratio(above: float | None, below: float | None) -> float | None:
    """`above / below` where both are known and it exists."""
    return measured(above / below) if above is not None and below else None


def size(byte_count: float | None) -> str:
    """Return bytes with three digits and a decimal unit: `3.21 GB`."""
    if byte_count is None:
        return NOTHING
    for unit in ("B", "kB", "MB", "GB"):
        # What would be rounded up to 1000 is one of the next unit.
        if byte_count < 999.5:
            return f"{byte_count:.3g}{_SPACE}{unit}"
        byte_count /= 1000
    return f"{byte_count:.3g}{_SPACE}TB"


def seconds(duration_s: float | None) -> str:
    """Return a time with three digits and a unit: `12.3 ms`."""
    if duration_s is None:
        return NOTHING
    unit, factor = time_unit(duration_s)
    return f"{duration_s * factor:.3g}{_SPACE}{unit}" if duration_s < 999.5 else f"{duration_s:,.0f}{_SPACE}s"


def time_unit(duration_s: float) -> tuple[str, float]:
    """Return the unit that a time is written in, and how many of them are a second."""
    for unit, factor in (("ns", 1e9), ("µs", 1e6), ("ms", 1e3)):
        if duration_s * factor < 999.5:
            return unit, factor
    return "s", 1.0


def rate(per_s: float | None) -> str:
    """Return tokens/s with three digits, or all digits of a whole number: `0.567`, `28.8`, `21,206`."""
    return NOTHING if per_s is None else f"{per_s:.3g}" if per_s < 999.5 else f"{per_s:,.0f}"


# A page consists of sections, each with facts, pictures and tables; the template knows no more than these classes.

# More pictures or rows than these are folded.
UNFOLDED = 12


@dataclass(frozen=True)
class PagePicture:
    """A picture, and its description in plain words."""

    title: str
    svg: Markup
    words: str


@dataclass(frozen=True)
class Pictures:
    """Pictures side by side where the page is wide enough, more of them if they are `small`.

    With `folded` they are behind a line that opens them.
    """

    form: ClassVar[str] = "pictures"
    pictures: Sequence[PagePicture]
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

    @classmethod
    def of(
        cls,
        title: str,
        items: Iterable[_Item],
        columns: Mapping[str, Callable[[_Item], str]],
        texts: frozenset[str] = frozenset(),
        words: str = "",
    ) -> "Table":
        """Return the table with a row for each of `items`: what `columns` say of it, by their names."""
        rows = [[text(item) for text in columns.values()] for item in items]
        return cls(title, list(columns), rows, texts, words, folded=len(rows) > UNFOLDED)

    def without_empty(self) -> "Table":
        """Return the table without the columns that hold `NOTHING` in every row."""
        kept = [i for i in range(len(self.columns)) if any(row[i] != NOTHING for row in self.rows)]
        columns = [self.columns[i] for i in kept]
        return replace(self, columns=columns, rows=[[row[i] for i in kept] for row in self.rows])


Part = Pictures | Table


@dataclass(frozen=True)
class PageSection:
    """The section of a source. `facts` are names and values; the summary links to `anchor`."""

    anchor: str
    kind: str
    name: str
    facts: Sequence[tuple[str, str]]
    parts: Sequence[Part]


def relative_change(accuracy: Mapping[str, Any]) -> float | None:
    """Return how far the predictors raise the perplexity."""
    found = measured(accuracy.get("relative_change"))
    quotient = ratio(measured(accuracy.get("perplexity")), measured(accuracy.get("dense_perplexity")))
    return found if found is not None or quotient is None else quotient - 1
