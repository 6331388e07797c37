"""Which rank a learned predictor starts from. Imports no torch: plans estimate predictors with it."""


def start_rank(hidden: int, neurons: int, firing_share: float, skewness: float) -> int:
    """The rank to start from, of a layer of which `firing_share` fires.

    On the layers of the bundled model 1.5 computed neurons for one that fires find 99.5 % of the contribution at ranks
    of 0.33 (3 % fire) to 0.42 (31 % fire) of the hidden size. Where few neurons do most of the firing (a large
    `skewness`), less has to be told.
    """
    share = (0.33 + 0.3 * firing_share) * (1.1 - 0.2 * skewness)
    return round_rank(share * hidden, min(hidden, neurons))


def round_rank(rank: float, most: int) -> int:
    """A rank that rows of packed weights are cut for: a multiple of 8, of 32 from 256 on; `most` where that is less."""
    unit = 32 if rank >= 256 else 8
    return max(1, min(most, max(1, round(rank / unit)) * unit))
