"""`picompile passes`: what graph passes there are."""

import dataclasses
import inspect
import json
from typing import TYPE_CHECKING, Any

from picompile.cli.options import DebugOption, JsonOption

if TYPE_CHECKING:
    from picompile_passes.infra import Pass


def passes_command(json_output: JsonOption = False, debug: DebugOption = False) -> None:
    """List the graph passes and their options.

    Installed packages can add some. Of those from canonical to canonical,
    compile --pass NAME runs one more.

    \b
    Examples:
      picompile passes
      picompile passes --json
    """
    from picompile_passes.registry import find_pass, registrations

    rows = [{**_describe(find_pass(name)), "origin": entry.origin} for name, entry in registrations().items()]
    if json_output:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        options = ", ".join(f"{name}: {kind}" for name, kind in row["options"].items())
        print(f"{row['name']}  {row['requires']} → {row['ensures']}  from {row['origin']}")
        print(f"    {row['summary']}")
        if options:
            print(f"    options: {options}")


def _describe(pass_class: "type[Pass]") -> dict[str, Any]:
    return {
        "name": pass_class.name,
        "requires": pass_class.requires.text,
        "ensures": pass_class.ensures.text,
        "summary": (inspect.getdoc(pass_class) or "").splitlines()[0],
        "options": {
            field.name: field.type if isinstance(field.type, str) else _type_name(field.type)
            for field in dataclasses.fields(pass_class)  # type: ignore[arg-type]
        },
    }


def _type_name(kind: Any) -> str:
    return kind.__name__ if inspect.isclass(kind) and not hasattr(kind, "__args__") else str(kind)
