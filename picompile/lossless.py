"""Compiling a checkpoint as it is, for this machine's processor: no plan, no predictor that is trained, no options.

Profiling compiles a model in this way, to have it write text.
"""

from pathlib import Path

from picompile.artifact.code import planned_code
from picompile.artifact.writer import ArtifactContents, make_room, write_artifact
from picompile.choices import CHUNK, KV_DTYPES, default_kv_dtype
from picompile.progress import Progress
from picompile.steps import capture_model, lower_graph, run_passes

_TARGET = "cpu"
_QUANT = "f16"


def compile_lossless(model: Path, output: Path, context: int, progress: Progress) -> None:
    """Compile the checkpoint folder `model` into the new folder `output`, in f16, with a cache of `context` tokens.

    Raises:
        UnsupportedModelError: the model cannot be compiled.
        DoesNotFitError: the disk cannot hold the artifact.
        MachineError, ToolchainError: no code can be made on this machine.
    """
    from picompile_codegen.lowering.function import LowerOptions
    from picompile_codegen.lowering.placement import Placement
    from picompile_passes.passes.canonicalize import CANONICALIZE
    from picompile_passes.passes.insert_predictors import InsertPredictors
    from picompile_passes.passes.partition import Partition
    from picompile_passes.passes.quantize import Quantize

    code = planned_code(_TARGET)
    captured = capture_model(model, progress)
    passes = [*CANONICALIZE, InsertPredictors("auto"), Partition({}), Quantize(_QUANT)]
    graph_module = run_passes(captured, passes, progress, verify=False)
    kv_dtype = KV_DTYPES[default_kv_dtype(captured.facts.activation)]
    options = LowerOptions(context, CHUNK, kv_dtype, 1, None, Placement.all_of(captured.facts.layers))
    lowered = lower_graph(graph_module, options, progress)
    make_room(output, lowered)
    contents = ArtifactContents(captured, model, _TARGET, _QUANT, code, None, graph_module, lowered, captured.weights)
    write_artifact(contents, output, progress)
