"""What to train."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from picompile.errors import UsageError
from picompile.quantities import require_whole

KINDS = ("learned", "sign")
INPUT_CHOICES = ("auto", "block", "stream", "previous")
WEIGHTINGS = ("contribution", "none")
DEVICES = ("auto", "cpu", "cuda")

# Aimed at on samples that training has not seen. Other text is less like them: aimed at 99.5 %, an OPT of 22 million
# parameters found 99.43 % on held-out text in its worst layer.
DEFAULT_RECALL = 0.997


@dataclass(frozen=True)
class TrainOptions:
    """How predictors are trained and chosen.

    `gate` bounds the relative rise of the model's perplexity on held-out text, None accepts any. `budget` bounds the
    predictors' parameters, as a share of the model's. `recall` is the share of the contribution of firing neurons that
    a layer's predictor must find, `computed_ratio` how many neurons it may compute for one that fires, where that can
    be had. `exact` allows the exact predictor where it is the better choice.

    `kind` is `learned`, or `sign`, of which only the threshold is searched. `input` is what learned predictors read;
    `auto` compares. `ranks` fixes the rank of all layers (an int) or of single ones, and `weighting` `none` counts all
    missed firings alike: with both, predictors are those of PowerInfer and Deja Vu but for their form. `epochs` are
    passes over the samples.

    `jobs` is how many layers are trained at a time (None: one a core, as far as 5 GiB go), `ray` the address of a
    Ray cluster that does it instead. Neither changes the result.
    """

    kind: str = "learned"
    gate: float | None = 0.001
    budget: float = 0.06
    recall: float = DEFAULT_RECALL
    computed_ratio: float = 1.5
    exact: bool = True
    input: str = "auto"
    ranks: int | Mapping[int, int] | None = None
    weighting: str = "contribution"
    epochs: int = 3
    rounds: int = 5
    gate_tokens: int = 8192
    seed: int = 0
    device: str = "auto"
    jobs: int | None = None
    ray: str | None = field(default=None, compare=False)
    overwrite: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        """Raises `UsageError` for values that make no sense."""
        for name, value, known in (
            ("predictor", self.kind, KINDS),
            ("input", self.input, INPUT_CHOICES),
            ("weighting", self.weighting, WEIGHTINGS),
            ("device", self.device, DEVICES),
        ):
            if value not in known:
                raise UsageError(f"unknown {name} {value!r}; known are {', '.join(known)}")
        for name, share in (("budget", self.budget), ("recall", self.recall)):
            if not 0 < share <= 1:
                raise UsageError(f"the {name} must be above 0 and at most 1, not {share}")
        given = self.ranks.values() if isinstance(self.ranks, Mapping) else () if self.ranks is None else (self.ranks,)
        for rank in given:
            require_whole(rank=rank)
        numbers = ("epochs", "rounds", "gate_tokens", "seed", "jobs")
        require_whole(**{name: getattr(self, name) for name in numbers})
        counts = (*given, self.epochs, self.gate_tokens, self.jobs or 1)
        if any(count < 1 for count in counts) or self.rounds < 0:
            raise UsageError("ranks, epochs, gate tokens and jobs must be at least 1, rounds at least 0")
        if self.computed_ratio < 1:
            raise UsageError(f"the computed ratio must be at least 1, not {self.computed_ratio}")

    def rank_of(self, layer: int) -> int | None:
        """The rank that is asked for, None where it is to be searched."""
        return self.ranks.get(layer) if isinstance(self.ranks, Mapping) else self.ranks
