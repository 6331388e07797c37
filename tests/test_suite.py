"""Which tests `make test` and `make test-slow` run: together all there are."""

import re

import pytest

from helpers.slow import SLOW, SlowTests, is_slow, unused_starts
from helpers.support import ROOT

RULES = (SlowTests("of each kernel one is enough", ("a/test_x.py::",), ("a/test_x.py::test_one[q4",)),)


@pytest.mark.parametrize(
    ("name", "slow"),
    [("a/test_x.py::test_one[q4-1]", False), ("a/test_x.py::test_one[f16-1]", True), ("a/test_y.py::test_one", False)],
)
def test_a_rule_names_tests_by_how_they_begin(name: str, slow: bool) -> None:
    assert is_slow(name, RULES) == slow


def test_a_rule_for_tests_that_are_gone_is_found() -> None:
    assert unused_starts(["a/test_x.py::test_two"], RULES) == ["a/test_x.py::test_one[q4"]


def test_the_two_runs_are_all_tests() -> None:
    runs = re.findall(r"^\t\$\(PYTEST\) (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert runs == ['-m "not slow"', "-m slow"]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert [line for line in script if line.startswith("make ")] == ["make test", "make test-slow"]


def test_every_rule_says_why() -> None:
    assert SLOW
    assert all(rule.why and rule.tests for rule in SLOW)
