"""Options of skipping: its places, its bound, and its text."""

from dataclasses import dataclass, field
from pathlib import Path

from picompile.errors import UsageError
from picompile.predictors.profile.text import CalibrationText
from picompile.quantities import require_whole

# The places where a model can skip. `gate` leaves out neurons by their activated gate, before up and down are read, and
# `output` by their output, before down is read.
SITES = ("gate", "output")


@dataclass(frozen=True)
class SkippingOptions:
    """Options that decide how much of a model is skipped.

    Attributes:
        bound: the share by which skipping may raise the perplexity of the text.
        calibration: files (`-` is standard input) or texts. Without any, Python's standard library.
        tokens: the most tokens that perplexity is measured on.
        sensitivity_tokens: the most tokens that sensitivities are measured on, others than these.
        seed: seed of the order of the library's files, and of the tokens that are drawn for sensitivities.
        activation: the activation of the feed-forward blocks, where config.json names another than the model was
            trained with, as `load_model` takes it; None takes what config.json says.
    """

    bound: float
    calibration: tuple[Path | CalibrationText, ...] = ()
    tokens: int = 16_384
    sensitivity_tokens: int = 4_096
    seed: int = 0
    # Left out of what a run's inputs are told apart by: the model's fingerprint, beside it, depends on it.
    activation: str | None = field(default=None, repr=False)

    @property
    def text_tokens(self) -> int:
        """The most tokens of the text that are read."""
        return self.tokens + self.sensitivity_tokens

    def __post_init__(self) -> None:
        """Raise `UsageError` for values that make no sense."""
        require_whole(skip_tokens=self.tokens, sensitivity_tokens=self.sensitivity_tokens, seed=self.seed)
        check_bound(self.bound)
        if self.tokens < 2 or self.sensitivity_tokens < 1:
            raise UsageError(
                f"skipping is measured on at least 2 tokens, and sensitivities on 1, not {self.tokens} and "
                f"{self.sensitivity_tokens}"
            )


def check_bound(bound: float) -> None:
    """Raise `UsageError` unless `bound` is a share above 0."""
    if not 0 < bound < float("inf"):
        raise UsageError(f"the bound on what skipping costs must be a share above 0, not {bound}")


def check_sites(sites: tuple[str, ...]) -> None:
    """Raise `UsageError` unless `sites` are some of `SITES`, each once."""
    for site in sites:
        if site not in SITES:
            raise UsageError(f"unknown place to skip {site!r}; known are {', '.join(SITES)}")
    if not sites or len(set(sites)) < len(sites):
        raise UsageError(f"name each place to skip once: {', '.join(SITES)}")
