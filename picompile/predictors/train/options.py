"""Options of training, and the rank that a learned predictor starts from. Imports no torch, as plans need the rank."""

from collections.abc import Mapping
from dataclasses import dataclass

from picompile.choices import TRAINED
from picompile.frontend.activation import ACTIVATION
from picompile.options import OVERWRITE, Option, check_options, check_value, documented, option
from picompile.quantities import parse_accuracy_bound, parse_least_one, parse_share

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


INPUT_CHOICES = ("auto", "block", "stream", "previous")
WEIGHTINGS = ("contribution", "none")
DEVICES = ("auto", "cpu", "cuda")


@documented
@dataclass(frozen=True)
class TrainOptions:
    """Options of training and choosing predictors.

    Here, `off` of the accuracy bound is None, and shares are numbers. With `ranks` and without `weighting`, predictors
    are those of PowerInfer and Deja Vu except for their form. `jobs` does not change the result.

    `kind` is `learned`, or `sign`, for which only the threshold is searched. `weighting` `none` counts all missed
    firings alike. `epochs` are passes over the samples, and `rounds` how often the choice may be tightened to meet the
    accuracy bound. `ranks` may also have ranks of single layers.
    """

    kind: str = "learned"
    activation: str | None = ACTIVATION.field(None)
    accuracy_bound: float | None = option(
        "0.1%",
        "Accuracy bound: how far predictors may raise the perplexity on held-out text; off sets none.",
        metavar="SHARE",
        parse=parse_accuracy_bound,
        aliases=("--gate",),
        common=True,
    )
    budget: float = option(
        "6%",
        "Parameters of all predictors, as a share of the model's parameters.",
        metavar="SHARE",
        parse=parse_share,
        above=0,
        most=1,
        common=True,
    )
    # The target on samples that training has not seen. Other text is less like them: with a target of 99.5 %, an OPT of
    # 22 million parameters found 99.43 % on held-out text in its worst layer.
    recall: float = option(
        "99.7%",
        "The share of what firing neurons contribute that a predictor must find.",
        metavar="SHARE",
        parse=parse_share,
        above=0,
        most=1,
        common=True,
    )
    computed_ratio: float = option(
        1.5,
        "Neurons computed for each one that fires, at most, as far as the budget allows.",
        metavar="X",
        least=1,
        aliases=("--computed",),
    )
    exact: bool = option(True, "Allow exact predictors for layers where they read fewer bytes.")
    input: str = option(
        "auto",
        "What predictors read. block: the block's input. stream: that input before its norm. previous: the input of "
        "the block before.",
        choices=INPUT_CHOICES,
    )
    ranks: int | Mapping[int, int] | None = option(
        None,
        "Use this rank for all layers. Default: search a rank for each layer.",
        flags=("--rank",),
        metavar="N",
        parse=parse_least_one,
    )
    weighting: str = "contribution"
    epochs: int = 3
    rounds: int = 5
    check_tokens: int = 8192
    jobs: int | None = option(
        None,
        "Layers trained at the same time. Default: one for each core, as memory allows.",
        metavar="N",
        least=1,
        common=True,
    )
    device: str = option("auto", "Where training runs. auto: CUDA if there is a device.", choices=DEVICES)
    bf16: bool = option(
        False,
        "Multiply in bfloat16 while predictors are fitted, which takes less time on processors that have it.",
    )
    seed: int = option(0, "Seed for the order of the samples.", metavar="N", least=0)
    overwrite: bool = OVERWRITE.field(False, compare=False)

    def __post_init__(self) -> None:
        """Raise `UsageError` for values that make no sense."""
        check_options(self)
        ranks = self.ranks.values() if isinstance(self.ranks, Mapping) else (self.ranks,)
        for name, kind, value, declared in (
            ("predictor", str, self.kind, Option("", choices=TRAINED)),
            ("weighting", str, self.weighting, Option("", choices=WEIGHTINGS)),
            *(("rank", int, rank, Option("", least=1)) for rank in ranks),
            ("epochs", int, self.epochs, Option("", least=1)),
            ("check_tokens", int, self.check_tokens, Option("", least=1)),
            ("rounds", int, self.rounds, Option("", least=0)),
        ):
            check_value(name, kind, value, declared)

    def rank_of(self, layer: int) -> int | None:
        """Return the rank that is asked for; None if it is to be searched."""
        return self.ranks.get(layer) if isinstance(self.ranks, Mapping) else self.ranks
