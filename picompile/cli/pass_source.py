"""Read the facts of our own passes from their source, since importing a pass imports torch, which takes seconds."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import picompile_passes
from picompile_passes.passes import BUILTIN

_BASE = "picompile_passes.base:Pass"
# A pass's options can change its effect; the effect without options is listed.
_EFFECTS = ("default_effect", "effect")


def describe_builtin_passes() -> list[dict[str, Any]]:
    """Return the facts that `picompile passes` lists, a pass each, in order of their names, without importing any.

    Raise `ValueError` for a pass that is not written as a class with literal facts.
    """
    inherited = _assignments(_class_of(_BASE))
    return [{**_describe(location, inherited), "origin": "picompile"} for _, location in sorted(BUILTIN.items())]


def _describe(location: str, inherited: Mapping[str, ast.expr]) -> dict[str, Any]:
    found = _class_of(location)
    facts = {**inherited, **_assignments(found)}
    effect = next(facts[name] for name in _EFFECTS if name in facts)
    return {
        "name": ast.literal_eval(facts["name"]),
        "requires": _member(facts["requires"]),
        "ensures": _member(facts["ensures"]),
        "effect": _member(effect),
        "summary": (ast.get_docstring(found) or "").partition("\n")[0],
        "options": {
            statement.target.id: ast.unparse(statement.annotation)
            for statement in _annotated(found)
            if not _is_class_variable(statement) and isinstance(statement.target, ast.Name)
        },
    }


def _class_of(location: str) -> ast.ClassDef:
    """Return the class at `module:name`."""
    module, _, name = location.partition(":")
    path = Path(picompile_passes.__path__[0], *module.split(".")[1:]).with_suffix(".py")
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ClassDef) and statement.name == name:
            return statement
    raise ValueError(f"{path} has no class {name}")


def _annotated(found: ast.ClassDef) -> Iterator[ast.AnnAssign]:
    return (statement for statement in found.body if isinstance(statement, ast.AnnAssign))


def _assignments(found: ast.ClassDef) -> dict[str, ast.expr]:
    """Return the values of the class variables, by name."""
    return {
        statement.target.id: statement.value
        for statement in _annotated(found)
        if _is_class_variable(statement) and statement.value is not None and isinstance(statement.target, ast.Name)
    }


def _is_class_variable(statement: ast.AnnAssign) -> bool:
    return ast.unparse(statement.annotation).startswith("ClassVar")


def _member(value: ast.expr) -> str | None:
    """Return `canonical` for `Stage.CANONICAL`: the values of such enumerations are their names in small letters."""
    if isinstance(value, ast.Attribute):
        return value.attr.lower()
    if isinstance(value, ast.Constant) and value.value is None:
        return None
    raise ValueError(f"{ast.unparse(value)} is no member of an enumeration")
