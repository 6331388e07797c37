"""The failure of a pass as a script: the smallest graph that could be found on which it fails in the same way."""

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torch.fx import GraphModule

from picompile_passes.base import stage_of
from picompile_passes.errors import PassError, PassesError, VerifyError, is_for_the_user
from picompile_passes.graph.reduce import reduce_graph
from picompile_passes.graph.source import graph_source, pass_source
from picompile_passes.verify import verify

if TYPE_CHECKING:
    from picompile_passes.pipeline import GraphPass

_REDUCE_SECONDS = 20.0

_SCRIPT = '''"""Pass {name} fails on the graph below:

{message}

Written by picompile. Run it with a Python that has picompile{also}.
"""

{graph}

if __name__ == "__main__":
    Pipeline(({construct},), hook=verifying)(graph())
'''


def write_reproducer(
    where: Path | Callable[[], Path], pass_: "GraphPass", before: GraphModule, cause: Exception
) -> Path | None:
    """Writes `reproducer_NAME.py`, for the failure `cause` of `pass_` on the graph `before`.

    `where` is the folder, or makes it, once there is something to write.

    None where the failure does not show again by running the pass and verifying its result, or cannot be written down:
    then it came from elsewhere (a hook that found the disk full, say).
    """
    expected = _signature(cause)

    def fails_alike(graph_module: GraphModule) -> bool:
        found = _failure(pass_, graph_module)
        return found is not None and _signature(found) == expected

    try:
        if not fails_alike(before):
            return None
        script = _script(pass_, reduce_graph(before, _valid_and(fails_alike, before), _REDUCE_SECONDS))
        folder = where if isinstance(where, Path) else where()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"reproducer_{re.sub('[^a-z0-9]+', '_', pass_.name)}.py"
        path.write_text(script, encoding="utf-8")
    except Exception:
        # The user must learn of the failure itself, not of an error while the reproducer is written.
        return None
    return path


def _valid_and(fails_alike: Callable[[GraphModule], bool], before: GraphModule) -> Callable[[GraphModule], bool]:
    """The failure must stay one of the pass: where the graph kept the rules of its stage, the smaller one does too."""
    if not _verifies(before):
        return fails_alike
    return lambda graph_module: _verifies(graph_module) and fails_alike(graph_module)


def _verifies(graph_module: GraphModule) -> bool:
    try:
        verify(graph_module, stage_of(graph_module))
    except PassesError:
        return False
    return True


def _failure(pass_: "GraphPass", graph_module: GraphModule) -> Exception | None:
    """Return the error of running `pass_` and verifying its result; None where none is raised, or one for the user."""
    try:
        after = pass_(graph_module).graph_module
        if after is not graph_module:
            verify(after, stage_of(after))
    except PassError as error:
        return error.cause
    except Exception as error:
        return None if is_for_the_user(error) else error
    return None


def _signature(error: Exception) -> tuple[object, ...]:
    """Equal for failures of one kind: the rule that is broken, or the type of an error and the line that raised it."""
    if isinstance(error, VerifyError):
        return ("rule", error.rule)
    frames = traceback.extract_tb(error.__traceback__)
    return (type(error), frames[-1].filename, frames[-1].lineno) if frames else (type(error),)


def _script(pass_: "GraphPass", graph_module: GraphModule) -> str:
    failure = _failure(pass_, graph_module)
    message = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
    construct, imports, package = pass_source(pass_)
    also = f" and {package}" if package else ""
    return _SCRIPT.format(
        name=pass_.name,
        message=message.replace("\\", "\\\\").replace('"""', "'''"),
        also=also,
        graph=graph_source(graph_module, ["from picompile_passes.pipeline import Pipeline, verifying", *imports]),
        construct=construct,
    )
