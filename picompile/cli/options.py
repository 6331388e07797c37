"""Options and arguments that several commands share."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


def _set_debug(context: typer.Context, wanted: bool) -> bool:
    if wanted:
        context.obj.debug = True
    return wanted


# Eager, so that it counts for errors in the options after it as well.
DebugOption = Annotated[
    bool, typer.Option("--debug", help="On an error, print the traceback too.", callback=_set_debug, is_eager=True)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
ThreadsOption = Annotated[
    int | None,
    typer.Option("-t", "--threads", metavar="N", min=1, max=256, help="CPU threads. Default: one a physical core."),
]
ReplanOption = Annotated[
    bool,
    typer.Option(
        "--replan",
        help="Where the GPU has less memory free than the plan needs, leave weights with the host, instead of ending.",
    ),
]
ArtifactArgument = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="A compiled model's folder.")]


CalibrationOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="Text to learn from; may be given several times, - is standard input. Default: the sources and documents "
        "of Python's standard library, and text sampled from the model.",
        allow_dash=True,
        show_default=False,
    ),
]
GateOption = Annotated[
    str,
    typer.Option(metavar="SHARE", help="How far predictors may raise the perplexity on held-out text, or off."),
]
# What is said of the machine to plan for.
VramBudgetOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="What may be taken of the GPU's memory: 8GiB, 80%, or auto: what is free, of a target in the table 96 %.",
    ),
]
HostMemoryOption = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="The host's memory. Default: 64GiB; of this machine what is available."),
]
HostBandwidthOption = Annotated[
    str | None,
    typer.Option(
        metavar="RATE",
        help="How fast it reads: 67.2GB/s. Default: 51.2, two channels of DDR4-3200; of this machine as measured.",
    ),
]


class Quant(str, Enum):
    """Weight formats, as `picompile_passes.dialect.FORMATS` has them; not imported: that imports torch."""

    F16 = "f16"
    Q8 = "q8"
    Q4 = "q4"


class HotDeviceOption(str, Enum):
    """Where hot neurons run, as `picompile.compile` has it."""

    CUDA = "cuda"
    CPU = "cpu"


class KvDtype(str, Enum):
    """Element types of the key/value cache."""

    F16 = "f16"
    F32 = "f32"
    Q8 = "q8"
