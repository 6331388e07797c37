"""Options of calibrated rounding."""

from dataclasses import dataclass, field
from pathlib import Path

from picompile.errors import UsageError
from picompile.predictors.profile.text import CalibrationText
from picompile.quantities import require_whole


@dataclass(frozen=True)
class RoundingOptions:
    """The text that weights are rounded for.

    Attributes:
        calibration: Files (`-` is standard input) or texts. Without any, Python's standard library.
        tokens: The most tokens that are read.
        seed: Seed of the order of the library's files.
        activation: The activation of the feed-forward blocks, where config.json names another than the model was
            trained with, as `load_model` takes it; None takes what config.json says.
    """

    calibration: tuple[Path | CalibrationText, ...] = ()
    tokens: int = 32_768
    seed: int = 0
    # Left out of what a run's inputs are told apart by: the model's fingerprint, beside it, depends on it.
    activation: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Raise `UsageError` for a number of tokens that makes no sense."""
        require_whole(rounding_tokens=self.tokens, seed=self.seed)
        if self.tokens < 1:
            raise UsageError(f"the number of tokens to round for must be at least 1, not {self.tokens}")
