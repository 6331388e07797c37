"""Log-probabilities of tokens, from the model's logits.

They are log-softmax values: exponentials in float32, which numpy vectorizes, added up in float64. With 2^17 tokens they
are within 1e-6 of float64's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from picompile_runtime.sampling.sampler import Logits, check_highest, likeliest, top_logits
from picompile_server.request import TokenLogProbability


def log_probability(logits: Logits, token: int, top: int = 0) -> TokenLogProbability:
    """Return the log-probability of `token`, and those of the likeliest tokens in its place.

    Args:
        logits: the scores of the place, float32 [vocab].
        token: a token id.
        top: how many of the likeliest tokens to name; among equals those with the lowest ids.

    Raises:
        KernelError: the logits contain NaN, or rule out every token.
    """
    _, highest = likeliest(logits)
    check_highest(highest)
    log_sum = _log_sum(logits, highest)
    log_share = _log_share(float(logits[token]), highest, log_sum)
    if not top:
        return TokenLogProbability(token, log_share)
    ids = top_logits(logits, top)
    # Ascending ids, so that a stable sort leaves the lowest first among equal scores.
    ids = ids[np.argsort(-logits[ids], kind="stable")][:top]
    named = tuple((int(one), _log_share(float(logits[one]), highest, log_sum)) for one in ids)
    return TokenLogProbability(token, log_share, named)


def log_probabilities(logits: Logits, tokens: Sequence[int], top: int = 0) -> list[TokenLogProbability]:
    """Return the log-probability of each token in its place, bit for bit as `log_probability` of its row does.

    Args:
        logits: float32 [tokens, vocab]; row i has the scores of the place of `tokens[i]`.
        tokens: token ids.
        top: how many of the likeliest tokens to name for each place.

    Raises:
        KernelError: logits contain NaN, or rule out every token.
    """
    return [log_probability(row, token, top) for row, token in zip(logits, tokens, strict=True)]


def _log_sum(logits: Logits, highest: float) -> float:
    """Return log(sum of exp(score - highest)). Infinite scores share all of the probability."""
    if highest == math.inf:
        return math.log(int((logits == np.inf).sum()))
    # Scores far below the highest underflow to 0, which is what they add.
    with np.errstate(under="ignore"):
        total = np.exp(logits - np.float32(highest)).sum(dtype=np.float64)
    return math.log(float(total))


def _log_share(score: float, highest: float, log_sum: float) -> float:
    return (0.0 if score == highest else score - highest) - log_sum
