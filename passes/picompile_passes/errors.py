"""The errors of this package. `exit_code` is the exit code of a command that ends because of the error."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.fx import Node


class PassesError(Exception):
    """Root of the tree. An error of this very class is a fault of the program, not of its user."""

    exit_code = 1


class PassError(PassesError):
    """A pass failed. The message names the pass, the passes that ran before it, and the cause, which is chained.

    Args:
        pass_name: The `name` of the pass.
        predecessors: The names of the passes before it; None outside of a pipeline.
        cause: What went wrong.
        context: The text of the ten nodes around the fault.
        reproducer: A script that fails in the same way.
    """

    def __init__(
        self,
        pass_name: str,
        predecessors: Sequence[str] | None,
        cause: Exception,
        context: str = "",
        reproducer: Path | None = None,
    ) -> None:
        self.pass_name = pass_name
        self.predecessors = tuple(predecessors or ())
        self.cause = cause
        self.context = context or getattr(cause, "context", "")
        self.reproducer = reproducer
        order = f"after {', '.join(self.predecessors)}" if predecessors else "the first of its pipeline"
        before = "" if predecessors is None else f" ({order})"
        first, *rest = str(cause).splitlines() or [""]
        # On the first line, because a command shows no other.
        found = f"; to see it fail by itself, run {reproducer}" if reproducer is not None else ""
        head = f"pass {pass_name}{before} failed: {type(cause).__name__}: {first}{found}"
        super().__init__("\n".join([head, *rest, *context.splitlines()]))


class RewriteError(PassesError):
    """A pass used its rewriter wrongly or changed the graph without it. Names the method, the node, and what to do."""


class VerifyError(PassesError):
    """A graph breaks a rule of its stage. `context` is the text of the ten nodes around `node`."""

    def __init__(self, rule: str, node: "Node | None", message: str, context: str) -> None:
        self.rule = rule
        self.node = node
        self.context = context
        place = f" at {node.name}" if node is not None else ""
        super().__init__(f"rule {rule!r} broken{place}: {message}" + (f"\n{context}" if context else ""))


class PropagateError(PassesError):
    """The value of a node cannot be computed from the values of its arguments."""


class StageError(PassesError):
    """A pass got a graph of a stage that it does not accept."""

    exit_code = 2


class PassOptionError(PassesError):
    """An option of a pass has an invalid value, or there is no such pass or option."""

    exit_code = 2


class RegistryError(PassesError):
    """A pass cannot be loaded: two share its name, or what is registered does not import or is not a pass."""

    exit_code = 2


class UnsupportedGraphError(PassesError):
    """A graph holds what the dialect, or a requested pass, cannot express. Names the node and its operator."""

    exit_code = 3


def is_for_the_user(error: Exception) -> bool:
    """Return whether `error` is about the user's input rather than a fault of the program."""
    return isinstance(error, PassesError) and error.exit_code != PassesError.exit_code
