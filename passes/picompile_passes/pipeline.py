"""`Pipeline`, which runs passes one after another, and the hooks that watch them.

A hook is called after every pass with the graph before, the pass, the graph after, and the seconds the pass took.
Checking, dumping and timing are hooks; `each` joins several.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch.fx import GraphModule

from picompile_passes.base import GraphPass, PassResult, Stage, check_stage, stage_of
from picompile_passes.errors import PassError, PassOptionError, StageError, is_for_the_user
from picompile_passes.graph.dump import graph_text
from picompile_passes.reproducer import write_reproducer
from picompile_passes.verify import verify

Hook = Callable[[GraphModule, GraphPass, GraphModule, float], None]


@dataclass(frozen=True)
class Pipeline:
    """Runs `passes` one after another and calls `hook` after each, whether it modified the graph or not.

    Where a pass or its hook fails, a script that fails in the same way, on as small a graph as can be found in some
    seconds, is written to the folder `reproducers`, if there is one.
    """

    passes: tuple[GraphPass, ...]
    hook: Hook | None = None
    name: str = "pipeline"
    reproducers: Path | Callable[[], Path] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "passes", tuple(self.passes))

    @property
    def requires(self) -> Stage:
        """The earliest stage its first pass accepts."""
        return self.passes[0].requires if self.passes else min(Stage)

    @property
    def ensures(self) -> Stage | None:
        """The stage its passes lead to; None where none of them leads to one."""
        stages = [pass_.ensures for pass_ in self.passes if pass_.ensures is not None]
        return stages[-1] if stages else None

    def __call__(self, graph_module: GraphModule) -> PassResult:
        """Run all passes.

        Raises `StageError` before the first pass where a pass could not work on what the ones before it make. What goes
        wrong in a pass or its hook is raised as `PassError`, except errors for the user, which are raised as they are.
        """
        self._check_order(stage_of(graph_module))
        current = graph_module
        for position, pass_ in enumerate(self.passes):
            try:
                current = self._run(pass_, current)
            except Exception as error:
                if is_for_the_user(error):
                    raise
                raise self._failure(position, current, error) from _cause(error)
        return PassResult(current, modified=current is not graph_module)

    def _failure(self, position: int, before: GraphModule, error: Exception) -> PassError:
        """Return the error to raise where the pass at `position` met `error` on the graph `before`."""
        pass_, cause = self.passes[position], _cause(error)
        context = error.context if isinstance(error, PassError) else ""
        script = None
        if self.reproducers is not None:
            script = write_reproducer(self.reproducers, pass_, before, cause)
        return PassError(
            pass_.name,
            predecessors=[other.name for other in self.passes[:position]],
            cause=cause,
            context=context,
            reproducer=script,
        )

    def _run(self, pass_: GraphPass, before: GraphModule) -> GraphModule:
        start = time.perf_counter()
        after = pass_(before).graph_module
        seconds = time.perf_counter() - start
        if self.hook is not None:
            self.hook(before, pass_, after, seconds)
        return after

    def _check_order(self, stage: Stage) -> None:
        for pass_ in self.passes:
            try:
                check_stage(pass_.name, pass_.requires, pass_.ensures, stage)
            except StageError as error:
                order = ", ".join(other.name for other in self.passes)
                raise StageError(f"{error} (the order of passes is {order})") from error
            stage = stage if pass_.ensures is None else pass_.ensures


def _cause(error: Exception) -> Exception:
    """Return what went wrong in a pass, without the name of the pass around it."""
    return error.cause if isinstance(error, PassError) else error


def each(*hooks: Hook | None) -> Hook:
    """Return one hook that calls `hooks` in order; those that are None are left out."""

    def call_all(before: GraphModule, pass_: GraphPass, after: GraphModule, seconds: float) -> None:
        for hook in hooks:
            if hook is not None:
                hook(before, pass_, after, seconds)

    return call_all


def verifying(before: GraphModule, pass_: GraphPass, after: GraphModule, seconds: float) -> None:
    """A hook that checks every new graph against the rules of its stage. Raises `VerifyError`."""
    if after is not before:
        verify(after, stage_of(after))


@dataclass
class Timings:
    """A hook that records how long each pass took."""

    seconds: list[tuple[str, float]] = field(default_factory=list)

    def __call__(self, before: GraphModule, pass_: GraphPass, after: GraphModule, seconds: float) -> None:
        """Add one entry."""
        self.seconds.append((pass_.name, seconds))


class Dump:
    """A hook that writes the graph as text: `000_input.txt`, then `NNN_pass-name.txt` after each pass.

    Put before `verifying`, it leaves the faulty graph on disk.
    """

    def __init__(self, folder: Path) -> None:
        """Create `folder` where it is missing, and removes the dumps of another run from it.

        Raises `PassOptionError` where that cannot be done.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob("[0-9][0-9][0-9]_*.txt"):
                old.unlink()
        except OSError as error:
            raise PassOptionError(f"cannot make the folder for dumps {folder}: {error.strerror}") from error
        self._folder = folder
        self._written = 0

    def __call__(self, before: GraphModule, pass_: GraphPass, after: GraphModule, seconds: float) -> None:
        """Write one file; at the first call also the graph that went in."""
        if self._written == 0:
            self._write("input", before)
        self._write(pass_.name, after)

    def _write(self, name: str, graph_module: GraphModule) -> None:
        path = self._folder / f"{self._written:03d}_{name}.txt"
        try:
            path.write_text(graph_text(graph_module), encoding="utf-8")
        except OSError as error:
            raise PassOptionError(f"cannot write the dump {path}: {error.strerror}") from error
        self._written += 1
