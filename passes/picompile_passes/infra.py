"""The contract of a pass.

A pass is a frozen dataclass; its fields are its options. It takes a graph module and gives back another that shares
every tensor with the first; the first is never touched. `requires` is the earliest stage it works on and `ensures` the
stage of its result: a graph whose stage lies between the two is accepted, so that a pass can be run once more.
"""

import abc
import copy
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule

from picompile_passes.errors import PassesError, StageError
from picompile_passes.rewriter import Rewriter
from picompile_passes.stages import Stage, set_stage, stage_of


@dataclass(frozen=True)
class PassResult:
    """What a pass gives back. Where `modified` is false, `graph_module` is the very one that went in."""

    graph_module: GraphModule
    modified: bool


class Pass(abc.ABC):
    """Base of all passes. A subclass states name and stages and writes `rewrite`."""

    name: ClassVar[str]
    requires: ClassVar[Stage]
    ensures: ClassVar[Stage]

    @abc.abstractmethod
    def rewrite(self, rewriter: Rewriter) -> bool:
        """Changes `rewriter.graph_module` and says whether it did."""

    def __call__(self, graph_module: GraphModule) -> PassResult:
        """Runs the pass. Moving to a later stage counts as a modification.

        Raises `StageError` for a graph of another stage, and whatever `rewrite` raises.
        """
        stage = stage_of(graph_module)
        check_stage(self.name, self.requires, self.ensures, stage)
        result = copy_graph_module(graph_module)
        rewriter = Rewriter(result, self.name)
        changed = self.rewrite(rewriter)
        if rewriter.changes and not changed:
            raise PassesError(f"pass {self.name} says that it changed nothing, but made {rewriter.changes} changes")
        if not changed and stage == self.ensures:
            return PassResult(graph_module, modified=False)
        result = without_unused(result)
        set_stage(result, self.ensures)
        return PassResult(result, modified=True)


def check_stage(name: str, requires: Stage, ensures: Stage, stage: Stage) -> None:
    """Raises `StageError` unless `stage` lies between `requires` and `ensures`."""
    if requires <= stage <= ensures:
        return
    accepted = requires.text if requires == ensures else f"{requires.text} to {ensures.text}"
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
