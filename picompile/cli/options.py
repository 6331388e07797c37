"""Options and arguments that several commands share."""

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from picompile_runtime.run_options import RUN_OPTIONS


def _set_debug(context: typer.Context, wanted: bool) -> bool:
    if wanted:
        context.obj.debug = True
    return wanted


def run_option(key: str, **more: Any) -> Any:
    """Return the option of `picompile run` that `picompile_runtime.run_options` declares under `key`."""
    declared = RUN_OPTIONS[key]
    return typer.Option(
        *declared.names,
        help=declared.help,
        metavar=declared.metavar,
        min=declared.least if declared.kind is not int or declared.least is None else int(declared.least),
        max=declared.most if declared.kind is not int or declared.most is None else int(declared.most),
        **more,
    )


# Eager, so that it counts for errors in the options after it as well.
DebugOption = Annotated[bool, run_option("debug", callback=_set_debug, is_eager=True)]
JsonOption = Annotated[bool, run_option("json")]
ThreadsOption = Annotated[int | None, run_option("threads")]
ReplanOption = Annotated[bool, run_option("replan")]
ArtifactArgument = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="A compiled model's folder.")]
ModelArgument = Annotated[
    Path, typer.Argument(metavar="MODEL", help="A Hugging Face folder (config.json, *.safetensors), or a GGUF file.")
]


def _check_activation(name: str | None) -> str | None:
    from picompile.frontend.activation import check_activation

    check_activation(name)
    return name


ActivationOption = Annotated[
    str | None,
    typer.Option(
        "--activation",
        metavar="NAME",
        help="Activation of MODEL's feed-forward blocks, where its config.json names another than it was trained with: "
        "relu, silu, … or fatrelu(0.01). Default: what config.json says.",
        callback=_check_activation,
        show_default=False,
    ),
]
PredictorQuantOption = Annotated[
    str | None,
    typer.Option(
        "--predictor-quant",
        metavar="FORMAT",
        help="Weight format of predictors: auto, f16, q8, q6, q4m or q4. auto: that of the model, but q6 where it has "
        "4 bits. Fewer bits make smaller predictors, which name other neurons: the accuracy check says what that "
        "costs.",
        show_default=False,
    ),
]
FolderOutputOption = Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="The folder to make.")]

CalibrationOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="Text to learn from; repeatable; - reads standard input. Default: the sources and documents of Python's "
        "standard library, and text sampled from the model.",
        allow_dash=True,
        show_default=False,
    ),
]
AccuracyBoundOption = Annotated[
    str,
    typer.Option(
        metavar="SHARE",
        help="Accuracy bound: how far predictors may raise the perplexity on held-out text; off sets none.",
    ),
]
AccuracyOption = Annotated[
    str | None,
    typer.Option(
        "--accuracy",
        metavar="SHARE",
        help="Compare the artifact with MODEL in float32 on held-out text, part by part, and refuse it if its "
        "perplexity is further above; report sets no bound. Default: do not compare.",
        show_default=False,
    ),
]
# Options on the machine to plan for.
VramBudgetOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="GPU memory to use: 8GiB, 80%, or auto, which is what is free here, or 96 % of a GPU in the table.",
    ),
]
HostMemoryOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="Memory of the host. Default: 64GiB, or what is available if the target is this machine."
    ),
]
HostBandwidthOption = Annotated[
    str | None,
    typer.Option(
        metavar="RATE",
        help="Read bandwidth of the host's memory, as in 67.2GB/s. Default: 51.2 (two channels of DDR4-3200), or as "
        "measured if the target is this machine.",
    ),
]


class Rounding(str, Enum):
    """How weights are rounded, as `picompile.choices.ROUNDINGS` has it."""

    CALIBRATED = "calibrated"
    NEAREST = "nearest"


class Bf16(str, Enum):
    """Whether prompts are computed in bfloat16, as `picompile.choices.BF16_CHOICES` has it."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class HotDeviceOption(str, Enum):
    """Where hot neurons run, as `picompile.compile` has it."""

    CUDA = "cuda"
    CPU = "cpu"


class KvDtype(str, Enum):
    """Element types of the key/value cache."""

    F16 = "f16"
    F32 = "f32"
    Q8 = "q8"
    Q4 = "q4"
