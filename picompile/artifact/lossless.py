"""The shortest compilation: an artifact in f16 that computes what the model computes, for sampling text."""

from pathlib import Path

from picompile.artifact.code import planned_code
from picompile.artifact.writer import ArtifactContents, make_room, write_artifact
from picompile.choices import CHUNK, KV_DTYPES, default_kv_dtype
from picompile.frontend.hf import load_model
from picompile.frontend.tokenizer.read import read_tokenizer
from picompile.progress import Progress
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import lower
from picompile_codegen.lowering.placement import Placement
from picompile_passes.passes.canonicalize import CANONICALIZE
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Pipeline
from picompile_passes.reproducer import make_reproducer_folder

# What is compiled for, and the format of the weights.
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
    code = planned_code(_TARGET)
    with progress.step("capture"):
        captured = load_model(model, activation)
    tokenizer = read_tokenizer(model, captured.facts.vocab)
    passes = (*CANONICALIZE, InsertPredictors("auto"), Partition({}), Quantize(_QUANT))
    with progress.step("passes"):
        graph_module = Pipeline(passes, reproducers=make_reproducer_folder)(captured.graph_module).graph_module
    kv_dtype = KV_DTYPES[default_kv_dtype(captured.facts.activation)]
    options = LowerOptions(
        context,
        chunk=CHUNK,
        kv_dtype=kv_dtype,
        sequences=1,
        accelerator=None,
        placement=Placement.all_of(captured.facts.layers),
    )
    with progress.step("lower"):
        lowered = lower(graph_module, options)
    make_room(output, lowered)
    contents = ArtifactContents(
        captured,
        checkpoint=model,
        tokenizer=tokenizer,
        targets=_TARGET,
        quant=_QUANT,
        code=code,
        accelerator=None,
        graph_module=graph_module,
        lowered=lowered,
        weights=captured.weights,
    )
    write_artifact(contents, output, progress)
