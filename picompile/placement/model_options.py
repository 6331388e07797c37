"""The options of `picompile plan` about the model. This file imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from picompile.choices import (
    CHUNK_OPTION,
    CONTEXT,
    DEFAULT_QUANT,
    FORMATS_HELP,
    FOUR_BITS,
    KV_DTYPE,
    PREDICTOR_QUANT,
    SHORT_QUANT,
    STORED,
)
from picompile.frontend.activation import ACTIVATION
from picompile.options import documented, option
from picompile.predictors.profile.options import PROFILE_FILE


@documented
@dataclass(frozen=True)
class ModelOptions:
    """The user's options about the model. `source` is a checkpoint or a profile, None if there is a `shape`.

    `hub_name` is the name of the model on the hub whose config.json is the shape, None for other shapes. `on_gpu` says
    whether there is a GPU, on which the default of `chunk` depends.
    """

    source: Path | None = None
    shape: str | None = option(
        None,
        "No model, but a shape: opt-175b, llama-70b, …, or a config.json.",
        metavar="NAME|FILE",
        common=True,
    )
    activation: str | None = ACTIVATION.field(None)
    firing: str | None = option(
        None,
        "How neurons fire where there is no profile: opt, falcon, bamboo, reglu-7b, reglu-13b, reglu-70b; the share "
        "that fires on a token, 10%; or also the share that makes 80 % of the firings, 10%:30%.",
        metavar="CURVE",
        common=True,
    )
    profile: Path | None = option(None, "How MODEL's neurons fire. Default: profile it.", metavar="FOLDER", common=True)
    predictors: Path | None = option(None, "What train made: real sizes, and what they compute.", metavar="FOLDER")
    work: Path | None = option(None, "Take and keep profile and predictors here, as compile does.", metavar="DIR")
    quant: str | None = option(
        None,
        f"{FOUR_BITS}, {STORED}: as of compile; {FORMATS_HELP}. Default: {STORED} for a quantized MODEL, else "
        f"{DEFAULT_QUANT}.",
        metavar="FORMAT",
        common=True,
        short=SHORT_QUANT,
    )
    predictor: str | None = option(
        None,
        "learned, exact, sign or none, or a plug-in's. Default: learned where neurons can be silent, else none.",
        metavar="KIND",
    )
    predictor_quant: str | None = PREDICTOR_QUANT.field(None)
    predictor_input: str | None = option(
        None, "What the predictors of a shape read, as with train. Default: block.", choices=("block", "previous")
    )
    context: int | None = CONTEXT.field(None)
    chunk: int | None = CHUNK_OPTION.field(None)
    sequences: int = option(1, "Sequences that are decoded at the same time.", metavar="N", least=1, most=65_536)
    kv_dtype: str | None = KV_DTYPE.field(None)
    hub_name: str | None = None
    on_gpu: bool = False

    @property
    def is_profile(self) -> bool:
        """Whether the source is a profile. A folder that holds both counts as a model."""
        source = self.source
        if source is None or source.is_file():
            return False
        return not (source / "config.json").is_file() and (source / PROFILE_FILE).is_file()
