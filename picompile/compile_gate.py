"""The gate on accuracy, for artifacts that this machine may not be able to run.

What runs here is read as it will be used. Else a program for this machine stands in while the gate reads: of the same
graph, without the hot device where there is one, with the same weights, of which there may be many. What a GPU computes
differs from it only by the order of additions. An artifact for a GPU is judged by it also where that GPU is there, so
that the same inputs give the same figures and bytes everywhere.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from picompile.artifact.code import Code, build_code, native_code, runs_here
from picompile.artifact.writer import Compiled, Facts, write_program
from picompile.compile_options import LOSSLESS, CompileOptions
from picompile.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from picompile.artifact.code import AcceleratorTarget

_FILE = "kernels/gate.so"


def check_gate(options: CompileOptions, code: "Sequence[Code]") -> None:
    """Raises `MachineError` where a gate is to be passed and nothing can be made for this machine to read with."""
    if options.predictor not in LOSSLESS and not runs_here(code):
        native_code(_FILE)


def needs_stand_in(code: "Sequence[Code]", device: "AcceleratorTarget | None") -> bool:
    """Whether the gate reads with another program than the artifact's."""
    return not runs_here(code) or (device is not None and device.kind == "cuda")


def measure(compiled: Compiled, folder: Path, facts: Facts, progress: Progress) -> dict[str, Any]:
    """What the predictors cost, for the report. `folder` has weights and code; its program is yet to be written.

    Raises `AccuracyGateError` beyond the bound.
    """
    source, prediction = compiled.source, compiled.prediction
    if prediction is None:
        raise TypeError("no predictors to measure")
    lowered = compiled.lowered if compiled.host_only is None else compiled.host_only
    stand_in = needs_stand_in(source.code, source.device)
    if stand_in:
        code = [native_code(_FILE)]
        build_code(code, lowered, folder, progress)
        facts = Facts(code, facts.weights_sha256)
    write_program(compiled, lowered, folder, facts)
    accuracy = prediction.measure(folder, source.captured, source.context, compiled.options, progress)
    if stand_in:
        (folder / _FILE).unlink()
    return accuracy
