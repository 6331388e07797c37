"""`picompile targets`: the machines that models can be compiled for."""

import json

from picompile.cli.options import DebugOption, JsonOption
from picompile.targets import TARGETS


def targets_command(json_output: JsonOption = False, debug: DebugOption = False) -> None:
    """List the machines that models can be compiled for.

    \b
    Examples:
      picompile targets
      picompile targets --json
    """
    if json_output:
        rows = [{"name": t.name, "description": t.description, "features": t.features} for t in TARGETS.values()]
        print(json.dumps(rows, indent=2))
        return
    for target in TARGETS.values():
        print(f"{target.name}  {target.description}")
