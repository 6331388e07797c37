"""The contract of a pass: `Pass`, its `Stage`s and its `Effect`, and the copy of a graph that it works on.

A pass is a frozen dataclass; its fields are its options. It takes a graph module and returns another one that shares
every tensor with the first; the first is never changed. `requires` is the earliest stage it works on and `ensures` the
stage of its result. A graph of any stage between the two is accepted, so that a pass can be run once more. A pass that
works at any stage from `requires` on, and leaves the stage as it is, has `ensures` None.

A pass also states its `effect` on the logits and whether it is `idempotent`; `picompile.testing.check_pass` holds it
to both.
"""

import abc
import copy
import enum
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch.fx import Graph, GraphModule, Node

from picompile_passes.errors import PassError, RewriteError, StageError, is_for_the_user
from picompile_passes.graph.dump import context_text
from picompile_passes.graph.nodes import MARKS
from picompile_passes.graph.rewriter import Rewriter

_META_KEY = "stage"


class Stage(enum.IntEnum):
    """One stage of a graph; later stages are greater."""

    CAPTURED = 0
    CANONICAL = 1
    PREDICTED = 2
    PARTITIONED = 3
    QUANTIZED = 4

    @property
    def text(self) -> str:
        """The name in messages, dumps and `gm.meta["stage"]`."""
        return self.name.lower()


def stage_of(graph_module: GraphModule) -> Stage:
    """Return the stage that is noted in `graph_module.meta`. Raises `StageError` where none is noted."""
    text = graph_module.meta.get(_META_KEY)
    for stage in Stage:
        if stage.text == text:
            return stage
    raise StageError(f"the graph does not say its stage: meta[{_META_KEY!r}] is {text!r}")


def set_stage(graph_module: GraphModule, stage: Stage) -> None:
    """Note `stage` in `graph_module.meta`."""
    graph_module.meta[_META_KEY] = stage.text


class Effect(enum.Enum):
    """The effect of a pass on the logits."""

    EXACT = "exact"
    """The logits stay the same, up to the rounding of float32."""
    ROUNDS = "rounds"
    """The logits change because the pass rounds weights; they stay the same where the weights need no rounding."""
    SKIPS = "skips"
    """The logits change where neurons that fire are missed or left out; else they stay the same."""
    CHANGES = "changes"
    """The logits are those of another model, on purpose."""


@dataclass(frozen=True)
class PassResult:
    """The result of a pass. Where `modified` is false, `graph_module` is the very module that went in."""

    graph_module: GraphModule
    modified: bool


class GraphPass(Protocol):
    """A `Pass` or a `Pipeline`: what a pipeline consists of, and is itself."""

    @property
    def name(self) -> str:
        """The name in messages."""
        ...

    @property
    def requires(self) -> Stage:
        """The earliest stage it accepts."""
        ...

    @property
    def ensures(self) -> Stage | None:
        """The stage of its result; None where it is that of its input."""
        ...

    def __call__(self, graph_module: GraphModule) -> PassResult:
        """Runs it."""
        ...


class Pass(abc.ABC):
    """Base of all passes. A subclass states name and stages and writes `rewrite`.

    Attributes:
        name: How the pass is called on the command line and in messages, in kebab-case.
        requires: The earliest stage of a graph that it accepts.
        ensures: The stage of its result; None where the stage stays as it is.
        default_effect: How it changes the logits when its options do not say otherwise; see `effect`.
        idempotent: Whether a second run, on the result of the first, modifies nothing.
    """

    name: ClassVar[str]
    requires: ClassVar[Stage]
    ensures: ClassVar[Stage | None]
    default_effect: ClassVar[Effect] = Effect.EXACT
    idempotent: ClassVar[bool] = True

    @property
    def effect(self) -> Effect:
        """The effect on the logits. A pass whose options decide it overrides this property."""
        return self.default_effect

    @abc.abstractmethod
    def rewrite(self, rewriter: Rewriter) -> None:
        """Change `rewriter.graph` through `rewriter`, which counts the changes.

        The result is modified where `rewriter.changes > 0`. A pass that changes the graph by other means says so with
        `rewriter.changed(node)`.
        """

    def __call__(self, graph_module: GraphModule) -> PassResult:
        """Run the pass on a copy of `graph_module`. Moving to a later stage counts as a modification.

        Raises:
            StageError: The graph is of a stage that the pass does not accept.
            PassError: `rewrite` failed, or changed the graph in a way that would be lost or does not hold together;
                with the ten nodes around the place. Errors that are for the user are raised as they are.
        """
        stage = stage_of(graph_module)
        check_stage(self.name, self.requires, self.ensures, stage)
        result = _copy(graph_module, _WorkingCopy)
        rewriter = Rewriter(result, self.name, f"{type(self).__name__}.rewrite")
        try:
            self.rewrite(rewriter)
            _check_rewritten(graph_module, rewriter)
        except Exception as error:
            if is_for_the_user(error):
                raise
            context = context_text(rewriter.place) if rewriter.place is not None else ""
            raise PassError(self.name, None, error, context) from error
        ensured = stage if self.ensures is None else self.ensures
        if not rewriter.changes and stage == ensured:
            return PassResult(graph_module, modified=False)
        result = without_unused(result)
        set_stage(result, ensured)
        return PassResult(result, modified=True)


def _check_rewritten(before: GraphModule, rewriter: Rewriter) -> None:
    """Raise `RewriteError` for a change that was not counted, and for a node that is read before it is computed."""
    if not rewriter.changes:
        _check_unchanged(before.graph, rewriter)
    computed: set[Node] = set()
    for node in rewriter.graph.nodes:
        for read in node.all_input_nodes:
            if read not in computed:
                rewriter.place = node
                raise RewriteError(
                    f"{rewriter.method} made {node.name} read {read.name}, which is computed after it: "
                    f"create {read.name} with before={node.name}, or before an earlier node"
                )
        computed.add(node)


def _check_unchanged(before: Graph, rewriter: Rewriter) -> None:
    """Raise `RewriteError` where the graph differs from `before`, the one that it is a copy of."""
    old, new = ({node.name: node for node in graph.nodes} for graph in (before, rewriter.graph))
    removed = [("removed", name) for name in old if name not in new]
    added = [("added", name) for name in new if name not in old]
    changed = [("changed", name) for name in old if name in new and _described(old[name]) != _described(new[name])]
    for verb, name in (*removed, *added, *changed):
        rewriter.place = new.get(name)
        raise RewriteError(
            f"{rewriter.method} {verb} node {name} without its rewriter, so the change would be lost: use the methods "
            f"of Rewriter, or call rewriter.changed(node) after a change of your own"
        )


def _described(node: Node) -> tuple[object, ...]:
    meta = {key: value for key, value in node.meta.items() if key in (*MARKS, "notes")}
    return (node.op, node.target, str(node.args), str(node.kwargs), meta)


def check_stage(name: str, requires: Stage, ensures: Stage | None, stage: Stage) -> None:
    """Raise `StageError` unless `stage` lies between `requires` and `ensures`; None stands for the last stage."""
    last = max(Stage) if ensures is None else ensures
    if requires <= stage <= last:
        return
    accepted = requires.text if requires == last else f"{requires.text} to {last.text}"
    raise StageError(f"pass {name} needs a graph of stage {accepted}, but this one is {stage.text}")


def copy_graph_module(graph_module: GraphModule) -> GraphModule:
    """Return a graph module with nodes and metadata of its own, and with the same tensors and fake values."""
    return _copy(graph_module, GraphModule)


class _WorkingCopy(GraphModule):
    """A graph module that a pass changes. Its code is generated when it is called, which most passes never do."""

    def recompile(self) -> None:  # type: ignore[override]
        """Generate nothing."""

    def forward(self, *args: object, **kwargs: object) -> object:
        """Compute what the graph says at this moment."""
        return copy_graph_module(self)(*args, **kwargs)


def _copy(graph_module: GraphModule, kind: type[GraphModule]) -> GraphModule:
    result = kind(graph_module, copy.deepcopy(graph_module.graph))
    result.meta = dict(graph_module.meta)
    return result


def without_unused(graph_module: GraphModule) -> GraphModule:
    """Return the graph module without dead nodes, and without parameters and buffers that no node reads."""
    graph_module.graph.eliminate_dead_code()
    meta = dict(graph_module.meta)
    # A GraphModule takes from its root only the tensors that its graph names.
    result = GraphModule(graph_module, graph_module.graph)
    result.meta = meta
    return result
