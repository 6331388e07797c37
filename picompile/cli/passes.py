"""`picompile passes`: list the graph passes, and explain one."""

import dataclasses
import inspect
import json
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from picompile.cli.options import DebugOption, JsonOption

if TYPE_CHECKING:
    from picompile_passes.base import Pass

_GIVEN = "the stage it was given"
_EFFECTS = {
    "exact": "the logits stay the same, but for the rounding of float32",
    "rounds": "the logits change as far as weights are rounded, and stay the same where they need no rounding",
    "skips": "the logits change as far as neurons that fire are left out, and stay the same where none is",
    "changes": "the logits are those of another model, on purpose",
}


def passes_command(
    explain: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="All about one pass: its rules, stages, effect, options and checks."),
    ] = None,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List the graph passes and their options, or explain one.

    Installed packages can add some. compile --pass NAME runs one more, on the
    graph as soon as it has reached the stage that the pass needs.

    \b
    Examples:
      picompile passes
      picompile passes --explain quantize
      picompile passes --json
    """
    if explain is not None:
        from picompile_passes.registry import find_pass

        facts = _explain(find_pass(explain))
        print(json.dumps(facts, indent=2, ensure_ascii=False)) if json_output else _show(facts)
        return
    rows = list_passes()
    if json_output:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        options = ", ".join(f"{name}: {kind}" for name, kind in row["options"].items())
        print(f"{row['name']}  {row['requires']} → {row['ensures'] or _GIVEN}  {row['effect']}  from {row['origin']}")
        print(f"    {row['summary']}")
        if options:
            print(f"    options: {options}")


def list_passes() -> list[dict[str, Any]]:
    """Return the facts to list, a pass each, with those that installed packages add."""
    from picompile_passes.registry import PASSES

    return [_describe(PASSES[name]) for name in sorted(PASSES)]


def _describe(pass_class: "type[Pass]") -> dict[str, Any]:
    from picompile_passes.registry import PASSES

    return {
        "name": pass_class.name,
        "requires": pass_class.requires.text,
        "ensures": None if pass_class.ensures is None else pass_class.ensures.text,
        "effect": pass_class.default_effect.value,
        "summary": (inspect.getdoc(pass_class) or "").partition("\n")[0],
        "options": {field.name: _type_name(field.type) for field in _options(pass_class)},
        "origin": PASSES.origin(pass_class.name),
    }


def _options(pass_class: "type[Pass]") -> list["dataclasses.Field[Any]"]:
    return [field for field in dataclasses.fields(pass_class) if field.init]  # type: ignore[arg-type]


def _type_name(kind: Any) -> str:
    """Return a type's name without modules: `Mapping[int, str]` for `collections.abc.Mapping[int, str]`."""
    named = inspect.isclass(kind) and not hasattr(kind, "__args__")
    text = kind if isinstance(kind, str) else kind.__name__ if named else str(kind)
    return re.sub(r"\b[a-z_]+\.(?=[\w.])", "", text)


def _explain(pass_class: "type[Pass]") -> dict[str, Any]:
    """Return everything that `--explain --json` prints."""
    from picompile_passes.verify import RULES

    options = [_option(field) for field in _options(pass_class)]
    types = typing.get_type_hints(pass_class)
    examples = [f"{field.name}={_example(field, types[field.name])}" for field in _options(pass_class)]
    rules = RULES[pass_class.requires if pass_class.ensures is None else pass_class.ensures]
    return {
        **_describe(pass_class),
        "idempotent": pass_class.idempotent,
        "location": f"{pass_class.__module__}:{pass_class.__qualname__}",
        "doc": inspect.getdoc(pass_class) or "",
        "options": options,
        "example": f"{pass_class.name}{{{','.join(examples)}}}" if examples else pass_class.name,
        "rules": [{"name": rule.name, "says": (inspect.getdoc(rule.check) or "").partition("\n")[0]} for rule in rules],
    }


def _option(field: "dataclasses.Field[Any]") -> dict[str, Any]:
    value = _default(field)
    return {
        "name": field.name,
        "type": _type_name(field.type),
        "default": None if value is dataclasses.MISSING else _written(value),
        "help": field.metadata.get("help", ""),
    }


def _default(field: "dataclasses.Field[Any]") -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _written(value: Any) -> str:
    """Return a value as `--pass` takes it."""
    if isinstance(value, Mapping):
        return f"({','.join(f'{key}:{_written(item)}' for key, item in value.items())})"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"({','.join(map(_written, value))})"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _example(field: "dataclasses.Field[Any]", kind: Any) -> str:
    """Return an example of an option: the field's own, else its default, else a sample of its type."""
    if "example" in field.metadata:
        return str(field.metadata["example"])
    value = _default(field)
    if value is not dataclasses.MISSING and value not in ("", (), None) and value != {}:
        return _written(value)
    return _written(_sample(kind))


def _sample(kind: Any) -> Any:
    """Return a value of the type `kind`; for an unknown type its name in capitals."""
    origin, parameters = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in (Mapping, dict):
        return {_sample(parameters[0]): _sample(parameters[1])} if parameters else {"key": "value"}
    if origin in (tuple, list, Sequence):
        return (0, 1) if parameters[:1] == (int,) else (_sample(parameters[0]),) if parameters else ("value",)
    known = {int: 0, float: 0.5, bool: True, str: "text"}
    return known.get(kind, getattr(kind, "__name__", str(kind)).upper())


def _show(facts: Mapping[str, Any]) -> None:
    for line in _lines(facts):
        print(line)


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    yield f"{facts['name']}  from {facts['origin']}, {facts['location']}"
    yield ""
    yield facts["doc"]
    yield ""
    yield f"needs       a graph of stage {_accepted(facts['requires'], facts['ensures'])}"
    yield f"gives       one of {_GIVEN if facts['ensures'] is None else 'stage ' + facts['ensures']}"
    yield f"effect      {facts['effect']}: {_EFFECTS[facts['effect']]}"
    yield f"idempotent  {_idempotence(facts['idempotent'])}"
    if facts["options"]:
        yield ""
        yield from _table("options", [(o["name"], o["type"], _default_text(o), o["help"]) for o in facts["options"]])
    yield ""
    yield f"example     picompile compile MODEL -o ARTIFACT --pass '{facts['example']}'"
    yield ""
    title = f"rules of stage {facts['ensures']}, that its result is checked by"
    if facts["ensures"] is None:
        title = f"rules that its result is checked by, where that is of stage {facts['requires']}"
    yield from _table(title, [(rule["name"], rule["says"]) for rule in facts["rules"]])


def _accepted(requires: str, ensures: str | None) -> str:
    if ensures is None:
        return f"{requires} or later"
    return requires if requires == ensures else f"{requires} to {ensures}"


def _idempotence(idempotent: bool) -> str:
    if idempotent:
        return "yes: run again, on its own result, it modifies nothing"
    return "no: run again, on its own result, it modifies that too, or refuses"


def _default_text(option: Mapping[str, Any]) -> str:
    return "needed" if option["default"] is None else f"default {option['default'] or repr('')}"


def _table(title: str, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows below a title, in aligned columns; the last column can have any length."""
    yield title
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield "  ".join(["", *cells, row[-1]]).rstrip()
