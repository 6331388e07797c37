"""Steps that every compilation takes, each shown as progress, and the shortest compilation that is made of them."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from picompile.artifact.code import planned_code
from picompile.artifact.writer import ArtifactContents, make_room, write_artifact
from picompile.choices import CHUNK, KV_DTYPES, default_kv_dtype
from picompile.progress import Progress

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from picompile.frontend import Captured
    from picompile_codegen.lowering.function import LowerOptions
    from picompile_codegen.lowering.lower import Lowered
    from picompile_passes.base import Pass


def capture_model(model: Path, progress: Progress, activation: str | None = None) -> "Captured":
    """Return the model in the checkpoint folder `model`, captured; its warning, if any, is told to `progress`.

    `activation` is what `load_model` takes; raises as it does.
    """
    from picompile.frontend import load_model

    with progress.step("capture"):
        captured = load_model(model, activation)
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


# What `compile_lossless` compiles for.
_TARGET = "cpu"
_QUANT = "f16"


def compile_lossless(
    model: Path, output: Path, context: int, progress: Progress, activation: str | None = None
) -> None:
    """Compile the checkpoint folder `model` into the new folder `output`, in f16, with a cache of `context` tokens.

    It takes no plan, no trained predictor, and no options but the `activation` that `load_model` takes. Profiling
    compiles a model in this way, to sample text.

    Raises:
        UnsupportedModelError: the model cannot be compiled.
        DoesNotFitError: the disk cannot hold the artifact.
        MachineError, ToolchainError: no code can be made on this machine.
    """
    from picompile.frontend.tokenizer_files import read_tokenizer
    from picompile_codegen.lowering.function import LowerOptions
    from picompile_codegen.lowering.placement import Placement
    from picompile_passes.passes.canonicalize import CANONICALIZE
    from picompile_passes.passes.insert_predictors import InsertPredictors
    from picompile_passes.passes.partition import Partition
    from picompile_passes.passes.quantize import Quantize

    code = planned_code(_TARGET)
    captured = capture_model(model, progress, activation)
    tokenizer = read_tokenizer(model, captured.facts.vocab)
    passes = [*CANONICALIZE, InsertPredictors("auto"), Partition({}), Quantize(_QUANT)]
    graph_module = run_passes(captured, passes, progress, verify=False)
    kv_dtype = KV_DTYPES[default_kv_dtype(captured.facts.activation)]
    options = LowerOptions(context, CHUNK, kv_dtype, 1, None, Placement.all_of(captured.facts.layers))
    lowered = lower_graph(graph_module, options, progress)
    make_room(output, lowered)
    contents = ArtifactContents(
        captured, model, tokenizer, _TARGET, _QUANT, code, None, graph_module, lowered, captured.weights
    )
    write_artifact(contents, output, progress)
