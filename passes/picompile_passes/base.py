"""The stages a graph goes through, and where a graph module says at which it is."""

import abc
import copy
import enum
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule

from picompile_passes.errors import PassError, PassesError, StageError, is_for_the_user
from picompile_passes.graph.dump import context_text
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
    """The stage that `graph_module` says it is at. Raises `StageError` where it says none."""
    text = graph_module.meta.get(_META_KEY)
    for stage in Stage:
        if stage.text == text:
            return stage
    raise StageError(f"the graph does not say its stage: meta[{_META_KEY!r}] is {text!r}")


def set_stage(graph_module: GraphModule, stage: Stage) -> None:
    """Writes `stage` down on `graph_module`."""
    graph_module.meta[_META_KEY] = stage.text


# The contract of a pass.
#
# A pass is a frozen dataclass; its fields are its options. It takes a graph module and gives back another that shares
# every tensor with the first; the first is never touched. `requires` is the earliest stage it works on and `ensures`
# the
# stage of its result: a graph whose stage lies between the two is accepted, so that a pass can be run once more. A pass
# that works at any stage from `requires` on, and leaves it as it is, says None.
#
# Two more things a pass says of itself, and `picompile.testing.check_pass` holds it to them: its `effect` on what the
# model computes, and whether it is `idempotent`.


class Effect(enum.Enum):
    """What a pass does to the logits."""

    EXACT = "exact"
    """They stay the same, but for the rounding of float32."""
    ROUNDS = "rounds"
    """They change as far as it rounds weights, and stay the same where the weights need no rounding."""
    SKIPS = "skips"
    """They change as far as predictors miss neurons that fire, and stay the same where every neuron is computed."""
    CHANGES = "changes"
    """They are those of another model, on purpose."""


@dataclass(frozen=True)
class PassResult:
    """What a pass gives back. Where `modified` is false, `graph_module` is the very one that went in."""

    graph_module: GraphModule
    modified: bool


class Pass(abc.ABC):
    """Base of all passes. A subclass states name and stages and writes `rewrite`.

    `idempotent` says that a second run, on the result of the first, modifies nothing.
    """

    name: ClassVar[str]
    requires: ClassVar[Stage]
    ensures: ClassVar[Stage | None]
    effect: ClassVar[Effect] = Effect.EXACT
    idempotent: ClassVar[bool] = True

    @abc.abstractmethod
    def rewrite(self, rewriter: Rewriter) -> bool:
        """Changes `rewriter.graph_module` and says whether it did."""

    def __call__(self, graph_module: GraphModule) -> PassResult:
        """Runs the pass. Moving to a later stage counts as a modification.

        Raises `StageError` for a graph of another stage, what `rewrite` raises for the user as it stands, and
        `PassError` for all else, with the nodes around the place that the pass was at.
        """
        stage = stage_of(graph_module)
        check_stage(self.name, self.requires, self.ensures, stage)
        result = copy_graph_module(graph_module)
        rewriter = Rewriter(result, self.name)
        try:
            changed = self._rewrite(rewriter)
        except Exception as error:
            if is_for_the_user(error):
                raise
            context = context_text(rewriter.place) if rewriter.place is not None else ""
            raise PassError(self.name, None, error, context) from error
        ensured = stage if self.ensures is None else self.ensures
        if not changed and stage == ensured:
            return PassResult(graph_module, modified=False)
        result = without_unused(result)
        set_stage(result, ensured)
        return PassResult(result, modified=True)

    def _rewrite(self, rewriter: Rewriter) -> bool:
        changed = self.rewrite(rewriter)
        if rewriter.changes and not changed:
            raise PassesError(f"it says that it changed nothing, but made {rewriter.changes} changes")
        return changed


def check_stage(name: str, requires: Stage, ensures: Stage | None, stage: Stage) -> None:
    """Raises `StageError` unless `stage` lies between `requires` and `ensures`; None stands for the last there is."""
    last = max(Stage) if ensures is None else ensures
    if requires <= stage <= last:
        return
    accepted = requires.text if requires == last else f"{requires.text} to {last.text}"
    raise StageError(f"pass {name} needs a graph of stage {accepted}, but this one is {stage.text}")


def copy_graph_module(graph_module: GraphModule) -> GraphModule:
    """A graph module of its own nodes and metadata, and of the same tensors and fake values."""
    result = GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    result.meta = dict(graph_module.meta)
    return result


def without_unused(graph_module: GraphModule) -> GraphModule:
    """Removes dead nodes and every parameter and buffer that no node reads."""
    graph_module.graph.eliminate_dead_code()
    meta = dict(graph_module.meta)
    # A GraphModule takes over from its root only what its graph names.
    result = GraphModule(graph_module, graph_module.graph)
    result.meta = meta
    return result
