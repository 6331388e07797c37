"""The compiler driver: from a checkpoint to an artifact, in numbered steps.

1. capture    the model becomes an FX graph, without weights
2. predictors where they are trained: profile, train, or what a folder has of both
3. plan       for a GPU, unless it is given: which neurons are hot, and what else lies where (`picompile.compile_plan`)
4. passes     canonical → predicted → partitioned → quantized
5. lower      kernel calls, packed weights, planned buffers
6. kernels    TVM compiles them for each instruction set, gcc links them with the thread pool
7. weights    each tensor is read, transformed and written, one at a time
8. gate       perplexity with the predictors against every neuron; too far off, and larger predictors go back to 3
9. manifest   sizes and hashes; the folder is renamed into place
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from picompile.artifact.writer import Compiled, Source, write_artifact
from picompile.compile_options import (
    CHUNK,
    DEFAULT_CONTEXT,
    DEFAULT_GATE,
    HOT_DEVICES,
    KV_DTYPES,
    LOSSLESS,
    MOST_SEQUENCES,
    PREDICTORS,
    QUANTIZATIONS,
    CompileOptions,
)
from picompile.compile_passes import pipeline_passes, run_passes
from picompile.compile_plan import check_plan, check_plan_model, check_profile, find_plan
from picompile.errors import AccuracyError, UsageError
from picompile.output import OutputPath, reserve
from picompile.progress import NoProgress, Progress

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from picompile.artifact.code import AcceleratorTarget
    from picompile.frontend import Captured
    from picompile.frontend.captured import ModelFacts
    from picompile.placement.plan import Plan
    from picompile.predictors.predictor_set import PredictorSet
    from picompile_codegen.lowering.lower import Lowered
    from picompile_codegen.lowering.program import LoweredProgram

__all__ = [
    "CHUNK",
    "DEFAULT_CONTEXT",
    "DEFAULT_GATE",
    "HOT_DEVICES",
    "KV_DTYPES",
    "MOST_SEQUENCES",
    "PREDICTORS",
    "QUANTIZATIONS",
    "CompileOptions",
    "compile_model",
    "pipeline_passes",
    "run_passes",
]

# Of a tensor: indices have 32 bits.
_MOST_ELEMENTS = 2**31 - 1


def compile_model(
    model: "str | os.PathLike[str] | Captured",
    output: str | os.PathLike[str],
    options: CompileOptions | None = None,
    progress: Progress | None = None,
) -> None:
    """Compiles `model`, an HF folder or what `picompile.frontend.capture_module` returned, into the artifact `output`.

    Raises `UsageError` (2), `UnsupportedModelError` (3), `DoesNotFitError` (5), or `MachineError` or `ToolchainError`
    (6) where the code cannot be made here; each before anything is written.
    """
    options, progress, output = options or CompileOptions(), progress or NoProgress(), Path(output)
    from picompile.artifact.files import check_output

    def check() -> None:
        check_output(output, options.overwrite)

    # Before anything is made beside it.
    check()
    with reserve(output, overwrite=options.overwrite, check=check) as place:
        _compile_to(place, model, options, progress)


def _compile_to(
    place: OutputPath, model: "str | os.PathLike[str] | Captured", options: CompileOptions, progress: Progress
) -> None:
    from picompile.artifact.code import accelerator_target, planned_code
    from picompile.compile_gate import check_gate

    # Before the model is captured, which takes longer than to tell that a pass is not known.
    pipeline_passes(options)
    code, device = planned_code(options.target), accelerator_target(options)
    check_gate(options, code)
    if isinstance(model, str | os.PathLike):
        _check_folder(options, Path(model))
        _check_context(options, Path(model))
        folder, captured = Path(model), _capture(Path(model), progress)
    else:
        folder, captured = None, model
    source = Source(captured, folder, _context(captured.facts, options), code, device)
    if options.plan is not None:
        check_plan(options.plan, source, options, progress)
    if options.predictor in LOSSLESS:
        _compile(source, None, place, options, progress)
        return
    from picompile.predictors.predictor_set import find_prediction

    with find_prediction(folder, captured, place, options, progress) as prediction:
        _compile_gated(source, prediction, place, options, progress)


def _check_folder(options: CompileOptions, model: Path) -> None:
    """Raises `UsageError` for a plan, or a profile to plan with, of another checkpoint than `model`."""
    if options.plan is not None:
        check_plan_model(options.plan, model)
    if options.makes_plan and options.profile is not None:
        check_profile(options.profile, model)


def _compile(
    source: Source, prediction: "PredictorSet | None", place: OutputPath, options: CompileOptions, progress: Progress
) -> None:
    from picompile.compile_gate import needs_stand_in

    plan = find_plan(source, prediction, options, progress)
    insert, facts = None if prediction is None else prediction.insert_pass(), source.captured.facts
    passes = pipeline_passes(options, insert, facts, plan)
    graph_module = run_passes(source.captured, options, progress, passes)
    with progress.step("lower"):
        lowered = _lower(graph_module, source, plan, options, source.device)
        host_only = None
        if prediction is not None and source.device is not None and needs_stand_in(source.code, source.device):
            host_only = _lower(graph_module, source, plan, options, None)
    _say_if_large(lowered.program, progress)
    write_artifact(Compiled(source, options, plan, prediction, graph_module, lowered, host_only), place, progress)


def _compile_gated(
    source: Source, prediction: "PredictorSet", place: OutputPath, options: CompileOptions, progress: Progress
) -> None:
    """Compiles; where the gate is not met, again with larger predictors for the layers to blame."""
    while True:
        try:
            return _compile(source, prediction, place, options, progress)
        except AccuracyError as error:
            larger = prediction.larger(error.layers)
            if larger is None:
                raise
            progress.say(f"{error}; trying larger predictors there")
            prediction = larger


def _capture(model: Path, progress: Progress) -> "Captured":
    from picompile.frontend import load_model

    with progress.step("capture"):
        captured = load_model(model)
    if captured.warning is not None:
        progress.say(captured.warning)
    return captured


def _check_context(options: CompileOptions, model: Path) -> None:
    """Raises `UsageError` for a context that the model has no positions for, before it is captured."""
    if options.context is None:
        return
    from picompile.frontend.hf import open_checkpoint

    _context(open_checkpoint(model).facts, options)


def _context(facts: "ModelFacts", options: CompileOptions) -> int:
    limit = facts.max_positions
    context = options.context or min(limit or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    if limit is not None and context > limit:
        raise UsageError(f"a context of {context} tokens is more than the model's {limit} positions")
    elements = options.sequences * context * facts.kv_heads * facts.head_dim
    if elements > _MOST_ELEMENTS:
        raise UsageError(
            f"{_cache_text(options.sequences, context)} has {elements:,} elements a layer, and kernels count to "
            f"{_MOST_ELEMENTS:,}; choose fewer sequences or a smaller context"
        )
    return context


def _kv_dtype(captured: "Captured") -> str:
    """FATReLU jumps at its threshold: what a float16 cache rounds off moves neurons across and changes the logits."""
    return "f32" if captured.facts.activation.startswith("fatrelu") else "f16"


def _lower(
    graph_module: "GraphModule",
    source: Source,
    plan: "Plan | None",
    options: CompileOptions,
    device: "AcceleratorTarget | None",
) -> "Lowered":
    """The program for host and `device`, or for the host alone."""
    from picompile.artifact.code import placement
    from picompile_codegen.lowering.function import LowerOptions
    from picompile_codegen.lowering.lower import lower

    lower_options = LowerOptions(
        source.context,
        options.chunk,
        KV_DTYPES[options.kv_dtype or _kv_dtype(source.captured)],
        options.sequences,
        None if device is None else device.kind,
        placement(plan, source.captured.facts.layers),
    )
    return lower(graph_module, lower_options)


def _say_if_large(program: "LoweredProgram", progress: Progress) -> None:
    """An artifact may be for a machine that has more memory; on this one it would not load."""
    from picompile.machine.host import host_memory
    from picompile_runtime.devices.memory import in_units

    total_bytes, _ = host_memory()
    if program.state_bytes > total_bytes:
        needed, there = in_units(program.state_bytes, total_bytes)
        progress.say(
            f"{_cache_text(program.sequences, program.context)} takes {needed}, more than this machine's {there}: the "
            "artifact will not load here"
        )


def _cache_text(sequences: int, context: int) -> str:
    several = "" if sequences == 1 else f"{sequences} sequences of "
    return f"a cache for {several}{context} tokens"
