"""Steps that every compilation takes, each shown as progress: capture a model, run passes on its graph, lower it."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from picompile.progress import Progress

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from picompile.frontend import Captured
    from picompile_codegen.lowering.function import LowerOptions
    from picompile_codegen.lowering.lower import Lowered
    from picompile_passes.base import Pass


def capture_model(model: Path, progress: Progress) -> "Captured":
    """Return the model in the checkpoint folder `model`, captured; its warning, if any, is told to `progress`."""
    from picompile.frontend import load_model

    with progress.step("capture"):
        captured = load_model(model)
    if captured.warning is not None:
        progress.say(captured.warning)
    return captured


def run_passes(
    captured: "Captured",
    passes: "Sequence[Pass]",
    progress: Progress,
    dump_ir: Path | None = None,
    *,
    verify: bool = True,
) -> "GraphModule":
    """Return the graph of `captured` after `passes`.

    Args:
        captured: the model; its graph is not changed.
        passes: the passes, in order.
        progress: is told of each pass.
        dump_ir: a folder that receives the graph after every pass.
        verify: whether the rules of its stage are checked on each graph.
    """
    from picompile_passes.pipeline import Dump, Pipeline, each, verifying

    # The dump comes before verification, so that a faulty graph is there to be looked at.
    dump = Dump(dump_ir) if dump_ir is not None else None
    with progress.step("passes", len(passes)) as advance:
        hook = each(dump, verifying if verify else None, lambda *_: advance(1))
        pipeline = Pipeline(tuple(passes), hook, reproducers=dump_ir or _make_reproducer_folder)
        return pipeline(captured.graph_module).graph_module


def _make_reproducer_folder() -> Path:
    """Make a folder that only this user can read. It stays, since what is in it is for people."""
    return Path(tempfile.mkdtemp(prefix="picompile-reproducer-"))


def lower_graph(graph_module: "GraphModule", options: "LowerOptions", progress: Progress) -> "Lowered":
    """Return the program, the packed tensors and the kernels of a quantized graph."""
    from picompile_codegen.lowering.lower import lower

    with progress.step("lower"):
        return lower(graph_module, options)
