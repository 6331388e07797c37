"""The rank that a learned predictor starts from. Imports no torch: plans estimate predictors with it."""


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
