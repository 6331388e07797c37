"""Compiling a model: from a kept structure where there is one, else in all steps.

This module imports neither torch nor transformers nor TVM before it is known what is needed of them.
"""

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from picompile.artifact.output import check_output
from picompile.compile.structure.key import StructureKey, structure_key
from picompile.config import CompileOptions
from picompile.output import OutputPath, reserve
from picompile.processes import uncollected
from picompile.progress import NoProgress, Progress
from picompile_codegen.build import early_backtrace
from picompile_codegen.build.object_cache import find_object
from picompile_passes.formats import rounding_library

if TYPE_CHECKING:
    from picompile.frontend.captured import Captured
    from picompile.predictors.accuracy import AccuracyReport


def compile_model(
    model: "str | os.PathLike[str] | Captured",
    output: str | os.PathLike[str],
    options: CompileOptions | None = None,
    progress: Progress | None = None,
) -> "AccuracyReport | None":
    """Compile a model into the artifact `output`, which appears whole or not at all.

    Args:
        model: a Hugging Face folder, a GGUF file, or what `picompile.frontend.capture_module` returned.
        output: the folder to make.
        options: what to compile for; the defaults of `CompileOptions` unless given.
        progress: is told of each step.

    Returns:
        What the predictors cost; None where they are lossless, so that nothing was checked. The comparison with the
        checkpoint, if `options.checkpoint_bound` asks for one, is in the artifact's report.json.

    Raises:
        UsageError: the options do not fit the model, or `output` is in the way (exit code 2).
        UnsupportedModelError: the model cannot be compiled (3).
        DoesNotFitError: it does not fit the machine it is planned for, or the disk (5).
        MachineError, ToolchainError: the code cannot be made on this machine (6).
        AccuracyError: an accuracy bound is not met, and there are no larger predictors (7).
    """
    options, progress, output = options or CompileOptions(), progress or NoProgress(), Path(output)
    check = partial(check_output, output, options.overwrite)
    # Before anything is made beside it.
    check()
    with reserve(output, overwrite=options.overwrite, check=check) as place:
        rounding_library.begin()
        key = structure_key(model, options)
        if key is not None and _compiled_as_known(place, model, options, key, progress):
            return None
        early_backtrace.begin()
        with progress.step("load the compiler"), uncollected():
            from picompile.compile.driver import compile_in_steps
        return compile_in_steps(place, model, options, key, progress)


def _compiled_as_known(
    place: OutputPath,
    model: "str | os.PathLike[str] | Captured",
    options: CompileOptions,
    key: StructureKey,
    progress: Progress,
) -> bool:
    """Return whether a structure is kept by `key`, and the artifact was made from it and published.

    Where it cannot be, for whatever reason, the model is compiled in all steps, which say the reason.
    """
    kept = find_object(key.key)
    if kept is None or not isinstance(model, str | os.PathLike):
        return False
    with progress.step("load the compiler"), uncollected():
        from picompile.compile.structure.record import read_structure
        from picompile.compile.structure.use import write_known
    try:
        structure = read_structure(kept)
        with place.scratch() as scratch:
            write_known(structure, key, Path(model), place.path, scratch / "artifact", progress)
            if structure_key(model, options) != key:  # the file has changed meanwhile
                return False
            place.publish(scratch / "artifact")
    except Exception:
        return False
    return True
