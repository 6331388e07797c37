"""The stages a graph goes through, and where a graph module says at which it is."""

import enum

from torch.fx import GraphModule

from picompile_passes.errors import StageError

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
