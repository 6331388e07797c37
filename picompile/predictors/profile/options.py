"""Options of profiling."""

from dataclasses import dataclass, field
from pathlib import Path

from picompile.errors import UsageError
from picompile.frontend.activation import check_activation
from picompile.predictors.firing import MAGNITUDE, check_measure
from picompile.predictors.profile.text import CalibrationText
from picompile.quantities import require_whole

WINDOW = 512


@dataclass(frozen=True)
class ProfileOptions:
    """How a model is profiled.

    Attributes:
        calibration: Files (`-` is standard input) or texts to count firings on. Without any, Python's standard library
            and text sampled from the model.
        held_out: Text that is only measured on. Without any, the end of the calibration text.
        tokens: The most tokens to count firings on.
        samples: The number of tokens whose block inputs are kept.
        window: Tokens of a window; None: 512, or the model's positions if these are fewer.
        held_out_tokens: The most held-out tokens.
        gate: Accuracy bound: the largest relative rise of perplexity that thresholds of SiLU and GELU models may cause.
            None leaves the thresholds at zero.
        seed: Seed of the samples, of the order of the library's files, and of the model's text.
        overwrite: Replace a complete profile of other inputs.
        activation: The activation of the feed-forward blocks, where config.json names another than the model was
            trained with, as `load_model` takes it; None takes what config.json says.
        by: The measure of a neuron's output that thresholds are of: `magnitude`, or `contribution`, which is magnitude
            times the length of the neuron's row of the down matrix.
        bf16: Multiply matrices from values rounded to bfloat16. It takes less time, and counts a little differently.
    """

    calibration: tuple[Path | CalibrationText, ...] = ()
    held_out: tuple[Path | CalibrationText, ...] = ()
    tokens: int = 65_536
    samples: int = 32_768
    window: int | None = None
    held_out_tokens: int = 16_384
    gate: float | None = 0.001
    seed: int = 0
    overwrite: bool = False
    # Left out of the text that a profile's inputs are told apart by: the model's fingerprint, beside it, depends on it.
    activation: str | None = field(default=None, repr=False)
    # Left out of that text too, for profiles of earlier versions: see `ProfileTask.inputs`.
    by: str = field(default=MAGNITUDE, repr=False)
    bf16: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        """Raise `UsageError` for counts that make no sense, and for an activation or a measure that is not known."""
        check_activation(self.activation)
        check_measure(self.by)
        require_whole(
            tokens=self.tokens,
            samples=self.samples,
            window=self.window,
            held_out_tokens=self.held_out_tokens,
            seed=self.seed,
        )
        if self.window is not None and self.window < 2:
            raise UsageError(f"a window must have at least 2 tokens, not {self.window}")
        for name, value in (("tokens", self.tokens), ("samples", self.samples), ("held out", self.held_out_tokens)):
            if value < 1:
                raise UsageError(f"the number of tokens or samples ({name}) must be at least 1, not {value}")
