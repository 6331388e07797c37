"""One run of all windows through a model's segments, which goes on where the last process left it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule

from picompile.layerwise import Segment, run_segment
from picompile.layerwise.perplexity import WindowLoss
from picompile.profiling.collect import Replace
from picompile.profiling.workplace import Workplace
from picompile.progress import Progress
from picompile_passes.materialize import WeightSource

Extra = dict[str, Tensor]
"""What a pass gathers over several segments; saved with the states."""

Begin = Callable[[Segment, Extra], tuple[Replace, Callable[[], None]]]
"""Called before a segment: the calls to be made instead of the graph's, and what is to be done after the segment."""


@dataclass(frozen=True)
class Model:
    """A canonical graph in segments, and its weights."""

    graph_module: GraphModule
    segments: tuple[Segment, ...]
    weights: WeightSource


def run_pass(
    model: Model,
    name: str,
    windows: Sequence[Sequence[int]],
    begin: Begin,
    workplace: Workplace,
    progress: Progress,
    *,
    segments: int | None = None,
    loss: WindowLoss | None = None,
) -> Extra:
    """Runs `windows` through the first `segments` segments, by default all; `loss` receives the logits.

    `name` tells passes apart: what was saved of another is not gone on with.
    """
    chosen = model.segments[:segments]
    logits = model.graph_module.graph.output_node().all_input_nodes if loss is not None else ()
    first, states, extra = workplace.load_state(name, model.graph_module, chosen, windows)
    total = sum(map(len, windows)) * (len(chosen) - first)
    with progress.step(name, total) as advance:
        for number, segment in enumerate(chosen[first:], start=first):
            replace, finish = begin(segment, extra)
            run_segment(segment, model.weights, states, loss, logits, advance, replace)
            finish()
            if number + 1 < len(chosen):
                workplace.save_state(name, number + 1, states, extra)
    return extra
