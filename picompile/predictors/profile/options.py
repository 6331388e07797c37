"""Options of profiling."""

from dataclasses import dataclass, replace
from pathlib import Path

from picompile.frontend.activation import ACTIVATION
from picompile.options import OVERWRITE, Option, check_options, check_value, documented, option
from picompile.predictors.firing import MAGNITUDE, MEASURES
from picompile.predictors.profile.text import CALIBRATION, CalibrationText
from picompile.quantities import parse_accuracy_bound

PROFILE_FILE = "profile.json"
WINDOW = 512


@documented
@dataclass(frozen=True)
class ProfileOptions:
    """Options of profiling a model.

    Here, `off` of the accuracy bound is None, shares are numbers, and texts may stand for files. `held_out_tokens` are
    the most held-out tokens.
    """

    calibration: tuple[Path | CalibrationText, ...] = replace(CALIBRATION, common=True).field(())
    held_out: tuple[Path | CalibrationText, ...] = option(
        (),
        "Text for measuring only; repeatable. Default: the end of the calibration text, or files left out of it.",
        metavar="FILE",
        common=True,
    )
    tokens: int = option(
        65_536,
        "Count firings over N tokens, or over all the text if it has fewer.",
        metavar="N",
        least=1,
        common=True,
    )
    samples: int = option(
        32_768,
        "Keep the input of each feed-forward block for N of the tokens.",
        metavar="N",
        least=1,
        common=True,
    )
    window: int | None = option(
        None,
        f"Tokens that are read together. Default: {WINDOW}, or the model's limit if that is lower.",
        metavar="N",
        least=2,
    )
    held_out_tokens: int = 16_384
    accuracy_bound: float | None = option(
        "0.1%",
        "SiLU and GELU models: how far thresholds may raise the perplexity on held-out text; off keeps thresholds of "
        "zero.",
        metavar="SHARE",
        parse=parse_accuracy_bound,
        aliases=("--gate",),
        common=True,
    )
    seed: int = option(0, "Seed for drawing samples and text.", metavar="N", least=0)
    overwrite: bool = OVERWRITE.field(False)
    # Left out of the text that a profile's inputs are told apart by: the model's fingerprint, beside it, depends on it.
    activation: str | None = ACTIVATION.field(None, repr=False)
    # Left out of that text too, for profiles of earlier versions: see `ProfileTask.inputs`.
    by: str = option(
        MAGNITUDE,
        "SiLU and GELU models: the measure that thresholds apply to. magnitude: that of a neuron's output. "
        "contribution: magnitude times the length of the neuron's row of the down matrix.",
        choices=MEASURES,
        repr=False,
    )
    bf16: bool = option(
        False,
        "Multiply in bfloat16, which takes less time on processors that have it; counts change a little.",
        repr=False,
    )

    def __post_init__(self) -> None:
        """Raise `UsageError` for counts that make no sense, and for an activation or a measure that is not known."""
        check_options(self)
        check_value("held_out_tokens", int, self.held_out_tokens, Option("", least=1))
