"""The driver's accuracy check: the artifact that was written reads held-out text, even if its code cannot run here."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from picompile.artifact.code import Code, build_code, native_code, runs_here
from picompile.artifact.writer import WrittenArtifact, write_program
from picompile.choices import base_format
from picompile.compile.lower import lower_for
from picompile.config import CompileConfig, CompileOptions
from picompile.placement.plan import Plan
from picompile.predictors.accuracy import AccuracyReport
from picompile.predictors.predictor_set import PredictorSet
from picompile.progress import Progress
from picompile_passes.formats import predictor_format

_STAND_IN_FILE = "kernels/check.so"


def require_checkable(options: CompileOptions, code: Sequence[Code]) -> None:
    """Raise `MachineError` where an accuracy check is due, and no code for it can be made for this machine."""
    is_due = (not options.is_lossless and options.accuracy_bound is not None) or options.checkpoint_bound is not None
    if is_due and not runs_here(code):
        native_code(_STAND_IN_FILE)


def check_accuracy(
    artifact: WrittenArtifact,
    predictors: PredictorSet,
    plan: Plan | None,
    config: CompileConfig,
    progress: Progress,
) -> AccuracyReport:
    """Return what the predictors of `artifact` cost.

    The check may overwrite the artifact's program, report and manifest with those of a stand-in.

    Write these anew with `record_accuracy` before the artifact is published.

    Code that runs on this machine is checked as it is. Otherwise a program for this machine stands in for the
    artifact's during the check: it has the same graph and the same weights, which may be large, but no accelerator. A
    GPU's results differ from those of the stand-in only by the order of additions. An artifact for a GPU is checked by
    a stand-in even if that GPU is there, so that the same inputs give the same figures and bytes on every machine.
    """

    captured = artifact.contents.captured
    quant = predictor_format(base_format(config.quant), config.predictor_quant)
    with runnable_here(artifact, plan, config, progress) as folder:
        return predictors.check_accuracy(folder, captured, quant, config.context, config, progress)


@contextmanager
def runnable_here(
    artifact: WrittenArtifact, plan: Plan | None, config: CompileConfig, progress: Progress
) -> Iterator[Path]:
    """Give the artifact's folder, with a program in it that runs on this machine without a GPU.

    As after `check_accuracy`, program, report and manifest may be those of a stand-in then.
    """
    contents, folder = artifact.contents, artifact.folder
    accelerator = contents.accelerator
    has_gpu = accelerator is not None and accelerator.is_gpu
    if runs_here(contents.code) and not has_gpu:
        yield folder
        return
    lowered = contents.lowered
    if accelerator is not None:
        lowered = lower_for(
            contents.graph_module,
            contents.captured.facts,
            plan,
            config,
            accelerator=None,
            progress=progress,
            panels=not has_gpu,
        )
    code = [native_code(_STAND_IN_FILE)]
    build_code(code, lowered, folder, progress)
    try:
        write_program(contents, lowered, folder, code, artifact.weights_sha256)
        yield folder
    finally:
        (folder / _STAND_IN_FILE).unlink()
