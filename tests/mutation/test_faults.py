"""The planted faults still fit the passes, and the table is of these faults. The table itself takes an hour to make."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from check import PASSES, TABLE, Outcome, check, plant, table
from faults import FAULTS, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fits_the_source(fault):
    source = (PASSES / fault.file).read_text(encoding="utf-8")
    assert source.count(fault.old) == 1
    compile(source.replace(fault.old, fault.new), fault.file, "exec")


def test_a_fault_that_fits_no_line_is_not_planted(tmp_path):
    with pytest.raises(ValueError, match="stands 0 times"):
        plant(Fault("stale", "base.py", "no such line", "x"), tmp_path)


def test_the_table_is_of_these_faults():
    rows = re.findall(r"^\| (.+) \| `(.+)` \| (.+) \|$", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [(name, file) for name, file, _ in rows] == [(fault.name, fault.file) for fault in FAULTS]
    found = sum(by != "**not found**" for *_, by in rows)
    assert f"finds {found} of {len(FAULTS)}" in TABLE.read_text(encoding="utf-8")
    assert len(FAULTS) >= 30
    assert found >= len(FAULTS) - 1


def test_a_fault_that_is_found_and_one_that_is_not():
    lines = list(table([Outcome(FAULTS[0], "test_x: verifies", 1.0), Outcome(FAULTS[1], None, 1.0)]))
    assert "The property suite finds 1 of 2." in lines
    assert lines[-2].endswith("| `test_x: verifies` |")
    assert lines[-1].endswith("| **not found** |")


def test_the_suite_finds_a_fault():
    """One that breaks an import, so that it takes no time: the copy with the fault is what the suite runs on."""
    broken = Fault("breaks", "passes/partition.py", "from collections import Counter", "import no_such_module")
    assert check(broken).found_by is not None
