"""The rule of CONTRIBUTING.md that ruff has no rule for: functions are short."""

import ast
from pathlib import Path

from helpers.support import ROOT

FOLDERS = (
    "picompile",
    "passes/picompile_passes",
    "codegen/picompile_codegen",
    "runtime/picompile_runtime",
    "server/picompile_server",
)
MOST_LINES = 60


def long_functions(source: str) -> set[str]:
    """Return the names of a module's functions that are too long."""
    return {
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= MOST_LINES
    }


def test_functions_are_short() -> None:
    """Only commands are longer: their signatures are the options of the command line, one line or more each."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(paths) > 200
    found = {path: names for path in paths if (names := long_functions(path.read_text(encoding="utf-8")))}
    allowed = {name for names in found.values() for name in names if name.endswith("_command")}
    assert set().union(*found.values()) == allowed, found
    assert {path.relative_to(ROOT).parent for path in found} == {Path("picompile/cli")}


def test_a_long_function_is_found() -> None:
    body = "    x = 1\n" * MOST_LINES
    assert long_functions(f"def short():\n{body[10:]}def long():\n{body}") == {"long"}
