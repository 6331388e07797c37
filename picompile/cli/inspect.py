"""`picompile inspect`: the contents of an artifact."""

import json

from picompile.cli.options import ArtifactArgument, DebugOption, JsonOption


def inspect_command(artifact: ArtifactArgument, json_output: JsonOption = False, debug: DebugOption = False) -> None:
    """Show what an artifact holds: model, formats, sizes, memory, kernels of a GPU.

    Works on any machine, and does not hash the weights; verify does.

    \b
    Examples:
      picompile inspect build/tiny
      picompile inspect build/tiny --json
    """
    from picompile.cli.inspect_show import collect, show
    from picompile.library import open_compiled

    folder = open_compiled(artifact)
    facts = collect(folder)
    if json_output:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        show(facts)
