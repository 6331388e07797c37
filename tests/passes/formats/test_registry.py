"""The registry of weight formats: each is documented, has a reference for tests, and names others that there are."""

import sys
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path

import pytest

from helpers.installed import install
from helpers.support import ROOT
from helpers.weight_formats import ROW_FORMATS
from picompile.testing import weights
from picompile_passes.errors import RegistryError
from picompile_passes.formats import FORMATS

PLUGIN = """
from picompile_passes.formats import FLOAT16, Codec

CODEC = Codec("plugged", 4, FLOAT16, highest=15, table=tuple(range(-8, 8)), summary="16 levels")
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """`plugin("name = leveled:CODEC")` installs a package that offers formats; it is forgotten in the end."""
    monkeypatch.setattr(FORMATS, "_known", dict(FORMATS._known))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield lambda *points: install(tmp_path / "site", "leveled", PLUGIN, "picompile.formats", points)
    sys.modules.pop("leveled", None)


def documented() -> dict[str, list[str]]:
    """Return the cells of the tables of formats in docs/format.md, by the name of the format."""
    text = (ROOT / "docs" / "format.md").read_text().partition("\n## Weight formats\n")[2].partition("\n## ")[0]
    rows, found = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()], {}
    for number, row in enumerate(rows):
        if row[-1] == "bits a weight":
            cells = takewhile(lambda cells: len(cells) > 1, rows[number + 2 :])
            found |= {row[0].strip("`"): row[1:] for row in cells}
    return found


def test_each_format_is_documented_with_its_sizes() -> None:
    found = documented()
    assert set(found) == set(FORMATS.builtin)
    assert {name: float(cells[-1]) for name, cells in found.items()} == {name: FORMATS[name].bits for name in found}
    for name in ROW_FORMATS:
        (_, zeros, scales, _, _), form = found[name], FORMATS[name]
        assert scales == (f"K/32 {form.scale.name}" if form.scale else "none")
        assert zeros.startswith("K/32 bytes") if form.zero is None else zeros == "none"


def test_each_format_has_weights_that_it_represents() -> None:
    assert set(weights._DRAW) - {None} == set(ROW_FORMATS)


@pytest.mark.parametrize("name", FORMATS.builtin)
def test_what_a_format_says_fits_together(name: str) -> None:
    form = FORMATS[name]
    assert form.summary
    assert all(FORMATS[finer].bits > form.bits for finer in form.finer)
    assert all(FORMATS[other].bits > form.bits for other in (form.head, form.predictors) if other)
    if form.table:
        assert len(form.table) == 2**form.data_bits
        # Whole numbers are bytes; those of 8 bits are floats, and so are those of a grid that has others.
        assert form.has_floats or -127 <= min(form.table) < 0 < max(form.table) <= 127
        assert min(form.table) < 0 < max(form.table) and form.has_floats == (form.name in ("fp8", "nf4"))
        # Rounding makes no other zeros than those of a table, while a checkpoint has been rounded.
        assert 0 in form.table or not form.rows


def test_a_package_offers_a_format(plugin: Callable[..., str]) -> None:
    plugin("plugged = leveled:CODEC")
    assert "leveled" not in sys.modules
    assert [*FORMATS][-1] == "plugged"
    assert FORMATS["plugged"].bits == 4.5
    assert "q9" not in FORMATS


def test_a_name_of_ours_cannot_be_taken(plugin: Callable[..., str]) -> None:
    plugin("q4 = leveled:CODEC")
    with pytest.raises(RegistryError, match="two weight formats are called q4: one from picompile and leveled:CODEC"):
        list(FORMATS)
