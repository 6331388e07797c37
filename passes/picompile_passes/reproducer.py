"""Reproducers: scripts that show the failure of a pass on the smallest graph found that fails in the same way.

`reduce_graph` makes a graph smaller while it keeps a property. It may leave out a node where one of the node's
arguments has a value of the same shape and dtype: the node's users take that argument instead. A residual addition is
such a node, so whole blocks go at once. The search is delta debugging (Zeller and Hildebrandt, 2002): it tries halves
of the nodes first, then quarters, down to single nodes.
"""

import re
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.fx import GraphModule, Node

from picompile_passes.base import GraphPass, Stage, copy_graph_module, stage_of
from picompile_passes.errors import PassError, PassesError, VerifyError, is_for_the_user
from picompile_passes.graph.layers import mark_layers, token_calls
from picompile_passes.graph.nodes import INHERITED_MARKS, argument_position, calls
from picompile_passes.graph.operands import ATTENTION
from picompile_passes.graph.source import graph_source, pass_source
from picompile_passes.graph.values import same_value
from picompile_passes.verify import verify

Keeps = Callable[[GraphModule], bool]


def reduce_graph(graph_module: GraphModule, keeps: Keeps, seconds: float) -> GraphModule:
    """Return a smaller graph for which `keeps` holds, as it does for `graph_module`. Stops after `seconds`."""
    end = time.monotonic() + seconds
    size = -1
    while size != len(graph_module.graph.nodes) and time.monotonic() < end:
        size = len(graph_module.graph.nodes)
        # A node is replaced by its first argument of that kind, the residual stream, and in a second round by the last.
        for choice in (0, -1):
            graph_module = _round(graph_module, keeps, choice, end)
    return graph_module


def _round(graph_module: GraphModule, keeps: Keeps, choice: int, end: float) -> GraphModule:
    names = [node.name for node in graph_module.graph.nodes if _substitutes(node)]
    chunk = len(names)
    while chunk >= 1:
        for start in range(0, len(names), chunk):
            if time.monotonic() > end:
                return graph_module
            graph_module = _attempt(graph_module, names[start : start + chunk], keeps, choice) or graph_module
        chunk //= 2
    return graph_module


def _attempt(graph_module: GraphModule, names: Sequence[str], keeps: Keeps, choice: int) -> GraphModule | None:
    """Return the graph without the nodes `names`, with layers renumbered if need be; None if `keeps` fails for both."""
    smaller = _without(graph_module, names, choice)
    if smaller is None:
        return None
    if keeps(smaller):
        return smaller
    _mark_layers(smaller)
    return smaller if keeps(smaller) else None


def _without(graph_module: GraphModule, names: Sequence[str], choice: int) -> GraphModule | None:
    result = copy_graph_module(graph_module)
    left_out = False
    for node in result.graph.nodes:
        if node.name in names and (substitutes := _substitutes(node)):
            node.replace_all_uses_with(substitutes[choice])
            left_out = True
    if not left_out:
        return None
    for node in reversed(result.graph.nodes):
        # torch's own elimination of dead code would keep operators that it takes for random.
        if not node.users and node.op not in ("placeholder", "output"):
            result.graph.erase_node(node)
    smaller = GraphModule(result, result.graph)
    smaller.meta = dict(result.meta)
    return smaller


def _substitutes(node: Node) -> list[Node]:
    """Return the arguments of `node` whose values have its shape and dtype."""
    if node.op != "call_function" or "val" not in node.meta:
        return []
    return [other for other in node.all_input_nodes if same_value(other.meta.get("val"), node.meta["val"])]


def _mark_layers(graph_module: GraphModule) -> None:
    """Number attentions 0, 1, … again and, in a graph that has marks of layers, derive these anew."""
    graph = graph_module.graph
    if stage_of(graph_module) >= Stage.CANONICAL:
        for node in token_calls(graph):
            for key in INHERITED_MARKS:
                node.meta.pop(key, None)
        mark_layers(graph)
    for number, node in enumerate(calls(graph, ATTENTION)):
        node.update_arg(argument_position(node, "layer"), node.meta.get("layer", number))


_REDUCE_SECONDS = 20.0

_SCRIPT = '''"""Pass {name} fails on the graph below:

{message}

Written by picompile. Run it with a Python that has picompile{also}.
"""

{graph}

if __name__ == "__main__":
    Pipeline(({construct},), hook=verifying)(graph())
'''


def make_reproducer_folder() -> Path:
    """Make a folder that only this user can read. It stays, since what is in it is for people."""
    return Path(tempfile.mkdtemp(prefix="picompile-reproducer-"))


def write_reproducer(
    where: Path | Callable[[], Path], pass_: GraphPass, before: GraphModule, cause: Exception
) -> Path | None:
    """Write `reproducer_NAME.py` for the failure of a pass, and return its path.

    Args:
        where: The folder to write to, or a function that creates it, called once there is something to write.
        pass_: The pass that failed.
        before: The graph that it failed on.
        cause: The error that it raised, or that its result caused in the verifier.

    Returns:
        The path; None where the failure does not show again when the pass is run and its result verified (it came from
        a hook that found the disk full, say), or where the script cannot be written.
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
    """Return a property that also asks a smaller graph to be valid where `before` is: the pass must be at fault."""
    if not _verifies(before):
        return fails_alike
    return lambda graph_module: _verifies(graph_module) and fails_alike(graph_module)


def _verifies(graph_module: GraphModule) -> bool:
    try:
        verify(graph_module, stage_of(graph_module))
    except PassesError:
        return False
    return True


def _failure(pass_: GraphPass, graph_module: GraphModule) -> Exception | None:
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
    """Return what failures of one kind share: the broken rule, or the type of the error and the line that raised it."""
    if isinstance(error, VerifyError):
        return ("rule", error.rule)
    frames = traceback.extract_tb(error.__traceback__)
    return (type(error), frames[-1].filename, frames[-1].lineno) if frames else (type(error),)


def _script(pass_: GraphPass, graph_module: GraphModule) -> str:
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
