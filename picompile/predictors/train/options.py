"""Options of training, and the rank that a learned predictor starts from. Imports no torch, as plans need the rank."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from picompile.errors import UsageError
from picompile.frontend.activation import check_activation
from picompile.quantities import require_whole

# The rank that a learned predictor starts from. Imports no torch: plans estimate predictors with it.


def start_rank(hidden: int, neurons: int, firing_share: float, skewness: float) -> int:
    """Return the rank to start from in a layer in which `firing_share` of the neurons fire.

    In the layers of the bundled model, 1.5 computed neurons for each one that fires find 99.5 % of the contribution at
    ranks of 0.33 (3 % fire) to 0.42 (31 % fire) of the hidden size. Where few neurons do most of the firing (a large
    `skewness`), a smaller rank is enough.
    """
    share = (0.33 + 0.3 * firing_share) * (1.1 - 0.2 * skewness)
    return round_rank(share * hidden, min(hidden, neurons))


def round_rank(rank: float, most: int) -> int:
    """Return a rank that packed weights suit: a multiple of 8, from 256 on of 32; at most `most`."""
    unit = 32 if rank >= 256 else 8
    return max(1, min(most, max(1, round(rank / unit)) * unit))


# Options of training.


KINDS = ("learned", "sign")
INPUT_CHOICES = ("auto", "block", "stream", "previous")
WEIGHTINGS = ("contribution", "none")
DEVICES = ("auto", "cpu", "cuda")

# The target on samples that training has not seen. Other text is less like them: with a target of 99.5 %, an OPT of
# 22 million parameters found 99.43 % on held-out text in its worst layer.
DEFAULT_RECALL = 0.997


@dataclass(frozen=True)
class TrainOptions:
    """How predictors are trained and chosen.

    Attributes:
        kind: `learned`, or `sign`, for which only the threshold is searched.
        gate: Accuracy bound: the largest relative rise of the model's perplexity on held-out text. None accepts any.
        budget: Limit on the parameters of all predictors, as a share of the model's.
        recall: The share of the contribution of firing neurons that a layer's predictor must find.
        computed_ratio: How many neurons it may compute for each one that fires, as far as the budget allows.
        exact: Allow the exact predictor where it is the better choice.
        input: The input of learned predictors; `auto` compares all inputs.
        ranks: Fixes the rank of all layers (an int) or of single ones.
        weighting: `none` counts all missed firings alike. With this and `ranks`, predictors are those of PowerInfer and
            Deja Vu except for their form.
        epochs: Passes over the samples.
        rounds: How often the choice may be tightened to meet the accuracy bound.
        gate_tokens: Held-out tokens of the accuracy check.
        seed: Seed of the order of the samples.
        device: Where PyTorch trains: `auto`, `cpu` or `cuda`.
        bf16: Multiply matrices from values rounded to bfloat16 while predictors are fitted. What they find is measured
            in float32.
        jobs: How many layers are trained at a time (None: one per core, as far as 5 GiB of memory allow). It does not
            change the result.
        ray: The address of a Ray cluster that trains instead. It does not change the result.
        overwrite: Replace predictors of other inputs.
        activation: The activation of the feed-forward blocks, as `load_model` takes it: the one that the profile was
            made with. None takes what config.json says.
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
    bf16: bool = False
    jobs: int | None = None
    ray: str | None = field(default=None, compare=False)
    overwrite: bool = field(default=False, compare=False)
    activation: str | None = None

    def __post_init__(self) -> None:
        """Raise `UsageError` for values that make no sense."""
        check_activation(self.activation)
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
        """Return the rank that is asked for; None if it is to be searched."""
        return self.ranks.get(layer) if isinstance(self.ranks, Mapping) else self.ranks
