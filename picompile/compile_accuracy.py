"""The accuracy check of an artifact that is written, and that this machine may not be able to run.

Code that runs here is checked as it will be used. Else a program for this machine stands in for the artifact's during
the check: of the same graph, without the accelerator where there is one, with the same weights, which may be large.
What a GPU computes differs from it by the order of additions alone. An artifact for a GPU is checked by a stand-in also
where that GPU is there, so that the same inputs give the same figures and bytes everywhere.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from picompile.artifact.code import Code, build_code, native_code, runs_here
from picompile.artifact.writer import WrittenArtifact, write_program
from picompile.compile_lower import lower_for
from picompile.config import CompileConfig, CompileOptions
from picompile.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from picompile.placement.plan import Plan
    from picompile.predictors.accuracy import AccuracyReport
    from picompile.predictors.predictor_set import PredictorSet

_FILE = "kernels/gate.so"


def require_checkable(options: CompileOptions, code: "Sequence[Code]") -> None:
    """Raise `MachineError` where an accuracy check is due, and no code for it can be made for this machine."""
    if not options.is_lossless and not runs_here(code):
        native_code(_FILE)


def check_accuracy(
    artifact: WrittenArtifact,
    predictors: "PredictorSet",
    plan: "Plan | None",
    config: CompileConfig,
    progress: Progress,
) -> "AccuracyReport":
    """Return what the predictors of `artifact` cost; a stand-in may replace its program, report and manifest.

    Write these anew with `record_accuracy` before the artifact is published.
    """
    captured = artifact.contents.captured
    with _readable(artifact, plan, config, progress) as folder:
        return predictors.check_accuracy(folder, captured, config.context, config.predictor, progress)


@contextmanager
def _readable(
    artifact: WrittenArtifact, plan: "Plan | None", config: CompileConfig, progress: Progress
) -> Iterator[Path]:
    """Give the artifact's folder, with a program in it that runs on this machine without a GPU."""
    contents, folder = artifact.contents, artifact.folder
    accelerator = contents.accelerator
    has_gpu = accelerator is not None and accelerator.kind == "cuda"
    if runs_here(contents.code) and not has_gpu:
        yield folder
        return
    lowered = contents.lowered
    if accelerator is not None:
        lowered = lower_for(contents.graph_module, contents.captured.facts, plan, config, None, progress)
    code = [native_code(_FILE)]
    build_code(code, lowered, folder, progress)
    try:
        write_program(contents, lowered, folder, code, artifact.weights_sha256)
        yield folder
    finally:
        (folder / _FILE).unlink()
