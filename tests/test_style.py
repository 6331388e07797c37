"""Rules of CONTRIBUTING.md that ruff has no rule for: short functions, unique class names, plain docstrings."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from helpers.support import ROOT

FOLDERS = ("picompile", "passes/picompile_passes", "codegen/picompile_codegen", "runtime/picompile_runtime")
# Only docstrings are held to a rule in these.
OTHER_FOLDERS = ("benchmarks", "examples", "tests")
MOST_LINES = 60

# Their signatures are the options of the command line, one line or more each.
COMMANDS = {"bench_command", "compile_command", "plan_command", "profile_command", "train_command"}

# The compiler and the runtime do not import each other, and say the same to users.
SAME_NAMES = {"DoesNotFitError"}

# The first words of docstrings that leave the reader without a subject.
RIDDLES = ("Of ", "The same", "What ", "Says ")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def definitions(module: ast.Module) -> Iterator[Definition]:
    """Yield each function and class of a module. They are statements, so expressions are not searched."""
    found: list[ast.AST] = [module]
    while found:
        node = found.pop()
        if isinstance(node, Definition):
            yield node
        found.extend(child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))


def long_functions(source: str) -> dict[str, int]:
    """Return the functions of a module that are too long, and their lines."""
    lines = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in definitions(ast.parse(source))
        if not isinstance(node, ast.ClassDef)
    }
    return {name: count for name, count in lines.items() if count > MOST_LINES}


def read_modules(folders: Iterable[str]) -> dict[Path, str]:
    """Return the text of every module in `folders`, by its path from the repository's root."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in paths}


@pytest.fixture(scope="module")
def sources() -> dict[Path, str]:
    """Return the text of every module of the four packages, by its path."""
    found = read_modules(FOLDERS)
    assert len(found) > 200
    return found


def test_functions_are_short(sources: dict[Path, str]) -> None:
    found = {
        name: (str(path), count) for path, source in sources.items() for name, count in long_functions(source).items()
    }
    assert found.keys() - COMMANDS == set(), found
    assert COMMANDS - found.keys() == set(), "no exceptions that are not needed"
    assert {str(Path(path).parent) for path, _ in found.values()} <= {"picompile/cli"}


def test_a_long_function_is_found() -> None:
    body = "    x = 1\n" * MOST_LINES
    assert long_functions(f"def short():\n{body[10:]}def long():\n{body}") == {"long": MOST_LINES + 1}


def test_class_names_are_defined_once(sources: dict[Path, str]) -> None:
    places = defaultdict(list)
    for path, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path))
    assert {name for name, paths in places.items() if len(paths) > 1} == SAME_NAMES, places


def test_docstrings_have_a_subject(sources: dict[Path, str]) -> None:
    found = [
        f"{path}: {text}"
        for path, source in (sources | read_modules(OTHER_FOLDERS)).items()
        for module in [ast.parse(source)]
        for node in (module, *definitions(module))
        if (text := ast.get_docstring(node)) and text.startswith(RIDDLES)
    ]
    assert not found, "\n".join(found)
