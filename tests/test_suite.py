"""Which tests `make test` and `make test-slow` run: together all there are."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from helpers.products import sampled
from helpers.share import drawn
from helpers.support import ROOT

HOOK = """
import pytest
from helpers.slow_marks import settle_slow_marks

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    settle_slow_marks(config, items)
"""
TESTS = """
import pytest

@pytest.mark.{mark}
@pytest.mark.parametrize("form", ["f16", pytest.param("f32", marks=pytest.mark.slow("32 bits")), "q4", "q4m"])
def test_forms(form): ...

def test_other(): ...
"""


def collected(folder: Path, tests: str, *arguments: str) -> str:
    """Return the names of the tests that pytest would run in `folder`, or its error."""
    (folder / "conftest.py").write_text(HOOK)
    (folder / "test_x.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "--co", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.stderr if done.returncode == 4 else " ".join(re.findall(r"::(\S+)$", done.stdout, re.MULTILINE))


@pytest.mark.parametrize(
    ("mark", "slow", "fast"),
    [
        ('slow("seconds")', "f16 f32 q4 q4m", ""),
        ('slow("seconds", but=("q4",))', "f16 f32", "q4 q4m"),
        ('slow("seconds", but=("q4]", "f"))', "f32 q4m", "f16 q4"),
    ],
    ids=["all slow", "beginning", "whole id"],
)
def test_parameters_that_a_mark_leaves_fast(tmp_path: Path, mark: str, slow: str, fast: str) -> None:
    tests = TESTS.format(mark=mark)
    assert collected(tmp_path, tests, "-m", "slow") == " ".join(f"test_forms[{form}]" for form in slow.split())
    names = [*(f"test_forms[{form}]" for form in fast.split()), "test_other"]
    assert collected(tmp_path, tests, "-m", "not slow") == " ".join(names)


@pytest.mark.parametrize(
    ("mark", "error"),
    [
        ("slow", "test_x.py::test_forms[f16]: the mark needs one reason"),
        ('slow("")', "test_x.py::test_forms[f16]: the mark needs one reason"),
        ('slow("seconds", but=("q4"))', "test_x.py::test_forms[f16]: the mark takes nothing beside"),
        (
            'slow("seconds", but=("q8", "f", "q5"))',
            "test_x.py::test_forms: `but` of its mark `slow` fits no parameter: q5",
        ),
    ],
    ids=["no reason", "empty reason", "no tuple", "stale"],
)
def test_a_wrong_mark_is_an_error(tmp_path: Path, mark: str, error: str) -> None:
    assert error in collected(tmp_path, TESTS.format(mark=mark))


def test_a_mark_of_a_whole_file(tmp_path: Path) -> None:
    line = "\npytestmark = pytest.mark.slow('seconds'{})\n"
    tests = "import pytest" + line + "def test_one(): ..."
    assert collected(tmp_path, tests.format(""), "-m", "slow") == "test_one"
    assert "test_x.py: only a mark at a function" in collected(tmp_path, tests.format(", but=('a',)"))


def test_a_single_parameter_can_be_asked_for(tmp_path: Path) -> None:
    tests = TESTS.format(mark='slow("seconds", but=("q4",))')
    assert collected(tmp_path, tests, "test_x.py::test_forms[f16]") == "test_forms[f16]"


def test_a_share_has_a_case_of_each_test_and_depends_on_its_seed_alone() -> None:
    names = [f"test_a[{case}]" for case in range(40)] + [f"test_{number}" for number in range(400)]
    first, again, other = (drawn(names, 0.25, seed) for seed in ("one", "one", "two"))
    assert first == again != other
    assert sum("[" in name for name in first) == 10
    assert 60 < sum("[" not in name for name in first) < 140
    assert len(drawn(["test_b[1]", "test_b[2]"], 0.01, "one")) == 1 and set(drawn(names, 1.0, "")) == set(names)
    assert set().union(*(drawn(names, 0.25, str(seed)) for seed in range(60))) == set(names)


def test_samples_have_each_value_in_fast_tests_and_each_pair_in_slow_ones() -> None:
    lists = {"form": ("f16", "q4", "q8"), "rows": (1, 7, 13, 64), "gated": (False, True)}
    mark = sampled(slow="seconds", when=lambda form, rows, gated: not (form == "q4" and rows == 7), **lists)
    names, parameters = mark.args
    rows = [dict(zip(names.split(","), parameter.values, strict=True)) for parameter in parameters]
    fast = [row for row, parameter in zip(rows, parameters, strict=True) if len(parameter.marks) == 1]
    assert all({row[name] for row in fast} == set(values) for name, values in lists.items()) and len(fast) == 4
    pairs = {(row["form"], row["rows"]) for row in rows}
    assert len(pairs) == 11 and ("q4", 7) not in pairs and len(rows) < 22
    assert {(row["rows"], row["gated"]) for row in rows} == {(n, g) for n in lists["rows"] for g in lists["gated"]}


def test_samples_can_have_some_values_in_slow_tests_alone() -> None:
    forms, rows, large = ("f16", "q4", "q8"), (1, 7, 13), pytest.mark.slow("large")
    marked = [form if form == "q4" else pytest.param(form, marks=large) for form in forms]
    for mark in (
        sampled(slow="seconds", fixtures={"form": forms}, rows=rows, fast={"form": ("q4",)}),
        sampled(slow="seconds", fixtures={"form": marked}, rows=rows),
    ):
        parameters = mark.args[1]
        fast = {each.values for each in parameters if all(own.name != "slow" for own in each.marks)}
        assert fast == {("q4", number) for number in rows} and len(parameters) == 9
        assert mark.kwargs == {"indirect": ["form"]}
    with pytest.raises(ValueError, match=r"no fast row has form \['q5'\]"):
        sampled(slow="seconds", form=forms, rows=rows, fast={"form": ("q4", "q5")})


def test_the_two_runs_are_all_tests() -> None:
    runs = re.findall(r"^\t\$\(PYTEST\) (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert runs == ['-m "not slow"', "-m slow --share $(SHARE) --share-seed $(SEED)", "-m slow"]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert [line for line in script if line.startswith("make ")] == ["make test", "make test-share"]


def test_modules_of_tests_have_names_of_their_own() -> None:
    """Pytest imports them by their names alone, and one of two with the same name would not run."""
    paths = [path for path in (ROOT / "tests").rglob("test_*.py") if "__pycache__" not in path.parts]
    names = Counter(path.name for path in paths)
    assert len(paths) > 300 and [name for name, count in names.items() if count > 1] == []
