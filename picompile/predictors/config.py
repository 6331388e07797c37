"""The options of a compilation that concern its predictors, with every default filled in."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from picompile.choices import LOSSLESS

if TYPE_CHECKING:
    from picompile.predictors.profile.text import CalibrationText


@dataclass(frozen=True)
class PredictorConfig:
    """Which predictors a model gets, what they are trained on, and what they may cost.

    `kind` is the kind of the model's blocks. `insert_kind` is what `InsertPredictors` is told: `kind`, or `auto` where
    the user left it open, which decides block by block.

    A path is None where none was given: `predictors` is a folder of trained ones, `profile` of a profile to train on;
    `work` keeps what is made. `calibration` are text files to profile on.

    `accuracy_bound` is the share by which perplexity may rise, None where it may rise by any; the accuracy check reads
    at most `check_tokens` tokens, if `is_checked`.

    `activation` is the one that the user gave for the model, None where config.json has it: profile and predictors must
    be of the model with it.
    """

    kind: str
    insert_kind: str
    predictors: Path | None
    profile: Path | None
    calibration: "tuple[Path | CalibrationText, ...]"
    work: Path | None
    accuracy_bound: float | None
    is_checked: bool
    check_tokens: int
    activation: str | None = None

    @property
    def is_lossless(self) -> bool:
        """Whether no neuron that fires is left out, so that there is nothing to train and nothing to check."""
        return self.kind in LOSSLESS
