"""Faults made from syntax trees: each is one, in one place, and the tests that execute the place are run on it."""

import ast
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from check import FOLDERS, ROOT, Outcome, Reach, check, plant, reasons, table
from mutants import Mutant, draw, is_a_fault, mutants_of

SOURCE = '''"""Docs with 1 < 2."""
RULES = ("first", "second")
__all__ = ["f", "g"]
Place = Literal["here", "there"]


@dataclass(frozen=True)
class Known:
    place: Place


def f(x: int = 3) -> "1 + 1":
    """Return 1 - 1."""
    if x < 2 and not g(x, 4):
        raise ValueError(f"{x - 1} is 7")
    values = [y for y in RULES if y]
    values.append(x - 1)
    return g(x, key=True)
'''


@pytest.fixture
def made(tmp_path: Path) -> list[Mutant]:
    (tmp_path / "module.py").write_text(SOURCE)
    return [each for each in mutants_of(tmp_path, tmp_path / "module.py") if is_a_fault(each, SOURCE.encode())]


def test_all_faults_of_a_module(made: list[Mutant]) -> None:
    assert {(each.kind, each.old, each.new) for each in made} == {
        ("drops a rule", '("first", "second")', '("second",)'),
        ("drops a rule", '("first", "second")', '("first",)'),
        ("is off by one", "3", "4"),
        ("negates a condition", "x < 2 and not g(x, 4)", "(not (x < 2 and not g(x, 4)))"),
        ("and for or", "x < 2 and not g(x, 4)", "((x < 2) or (not g(x, 4)))"),
        ("drops a condition", "x < 2 and not g(x, 4)", "((not g(x, 4)))"),
        ("drops a condition", "x < 2 and not g(x, 4)", "((x < 2))"),
        ("turns a comparison round", "x < 2", "(x >= 2)"),
        ("moves a limit by one", "x < 2", "(x <= 2)"),
        ("is off by one", "2", "3"),
        ("drops a sign", "not g(x, 4)", "g(x, 4)"),
        ("swaps arguments", "g(x, 4)", "g(4, x)"),
        ("is off by one", "4", "5"),
        ("drops an error", 'raise ValueError(f"{x - 1} is 7")', "pass"),
        ("drops a filter", "y", "True"),
        ("drops a call", "values.append(x - 1)", "pass"),
        ("takes another operator", "x - 1", "(x + 1)"),
        ("swaps operands", "x - 1", "(1 - x)"),
        ("is off by one", "1", "2"),
        ("returns nothing", "return g(x, key=True)", "return None"),
        ("drops an argument", "g(x, key=True)", "g(x)"),
        ("says the opposite", "True", "False"),
    }


def test_a_fault_changes_its_place_alone(made: list[Mutant]) -> None:
    for mutant in made:
        changed = mutant.applied(SOURCE.encode()).decode()
        ast.parse(changed)
        assert changed == SOURCE[: mutant.start] + mutant.new + SOURCE[mutant.end :]
        assert SOURCE[: mutant.start].count("\n") == mutant.line - 1
        assert mutant.where == ("" if mutant.kind == "drops a rule" else "f")


@pytest.mark.slow("draws from all modules, several times")
def test_a_draw_depends_on_its_seed_alone() -> None:
    first, again, other = (draw(ROOT, FOLDERS, 20, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len({(each.file, each.start, each.new) for each in first}) == 20


def test_a_copy_of_the_package_has_the_fault(tmp_path: Path) -> None:
    (mutant,) = draw(ROOT, [FOLDERS[1]], 1, 3)
    plant(mutant, tmp_path)
    changed = tmp_path / Path(mutant.file).relative_to("codegen")
    assert changed.read_bytes() == mutant.applied((ROOT / mutant.file).read_bytes())


@pytest.mark.slow("runs the suite in a process of its own")
def test_a_fault_is_found_by_the_tests_that_execute_it() -> None:
    (mutant, *_) = mutants_of(ROOT, ROOT / FOLDERS[0] / "dialect" / "activations.py")
    found = check(mutant, ["tests/passes/dialect/test_activations.py"], None)
    assert found.found_by is not None
    assert check(mutant, [], None).found_by is None


def test_the_quickest_tests_come_first_as_many_as_there_is_patience_for(made: list[Mutant]) -> None:
    seconds = {"quick": 1.0, "slow": 100.0, "slower": 110.0, "sharing": 0.5, "elsewhere": 0.0}
    place = ("module.py", made[-1].line)
    reach = Reach({place: {"slower", "slow", "quick"}}, {place: {"quick", "sharing"}}, seconds)
    assert reach.of(made[-1]) == ["quick", "slow", "sharing"]


def test_a_file_of_tables_alone_has_the_tests_of_its_folder(made: list[Mutant]) -> None:
    mutant = replace(made[0], file="rules/table.py")
    reach = Reach({("rules/rule.py", 7): {"near"}, ("module.py", 7): {"far"}}, {}, {"near": 1.0, "far": 1.0})
    assert reach.of(mutant) == ["near"]


def test_the_table_names_what_is_not_found_and_keeps_its_reasons(made: list[Mutant]) -> None:
    assert all(reasons().values())
    lines = list(table([Outcome(made[0], "test_x", 1, 1.0), Outcome(made[1], None, 1, 1.0)], "command", "c0ffee"))
    assert "found 1 of 2 faults, drawn from the syntax trees at commit c0ffee" in "\n".join(lines)
    assert lines[-1] == f"| `module.py`, {made[1].name} |  |"
