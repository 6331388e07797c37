"""Distances between the next-token distributions of two models, token by token."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Rows of logits that are processed at a time: in float64 a row takes 1 MB with a large vocabulary.
_ROWS = 64


@dataclass(frozen=True)
class TokenDistances:
    """Figures of each predicted token, each [tokens].

    `reference_nll` and `nll` are the negative log-likelihoods of the token by the reference and by the model that is
    compared, `kl` is the Kullback-Leibler divergence KL(reference || model) of the distributions that it was predicted
    with, all in nats and in float64. `same_top` tells where both have the same likeliest token.
    """

    reference_nll: NDArray[np.float64]
    nll: NDArray[np.float64]
    kl: NDArray[np.float64]
    same_top: NDArray[np.bool_]


def measure_tokens(reference: Tensor, logits: Tensor, targets: Tensor) -> TokenDistances:
    """Return the distances for logits [n, vocabulary] of both models, and the n tokens that followed, int64 [n]."""
    parts = zip(*(torch.split(rows, _ROWS) for rows in (reference, logits, targets)), strict=True)
    return join_tokens(_measure_rows(*part) for part in parts)


def join_tokens(parts: Iterable[TokenDistances]) -> TokenDistances:
    """Return the figures of all tokens of `parts`, in order."""
    found = list(parts)
    return TokenDistances(
        np.concatenate([part.reference_nll for part in found]),
        np.concatenate([part.nll for part in found]),
        np.concatenate([part.kl for part in found]),
        np.concatenate([part.same_top for part in found]),
    )


def _measure_rows(reference: Tensor, logits: Tensor, targets: Tensor) -> TokenDistances:
    p, q = reference.double().log_softmax(dim=-1), logits.double().log_softmax(dim=-1)
    chances = p.exp()
    # A token that the reference rules out adds nothing, whatever the other says; 0 · (−∞ + ∞) would be NaN.
    terms = torch.where(chances > 0, chances * (p - q), 0.0)
    rows = torch.arange(len(targets))
    return TokenDistances(
        reference_nll=(-p[rows, targets]).numpy(),
        nll=(-q[rows, targets]).numpy(),
        # Rounding may leave less than nothing of equal distributions.
        kl=terms.sum(dim=-1).clamp(min=0).numpy(),
        same_top=(reference.argmax(dim=-1) == logits.argmax(dim=-1)).numpy(),
    )
