"""Predictor kinds: ways to tell which neurons will fire before they are computed.

| kind | tells by | loses |
| --- | --- | --- |
| `exact` | computing the gate in full (ReLU family only); up and down follow only where it fires | nothing |
| `none` | not at all: every neuron is computed | nothing |

`row_local` kinds need nothing but the rows of the neurons they speak of, so a partition may split them with the rows.

`add_predictor_kind` adds others, before graphs that use them are made or read.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class PredictorKind:
    """One kind. `evaluate(x [T, D], weights, threshold)` → bool [T, neurons]; `neurons(weights)` → that dimension."""

    name: str
    evaluate: Callable[[Tensor, list[Tensor], float], Tensor]
    neurons: Callable[[list[Tensor]], int]
    row_local: bool


def _first_rows(weights: list[Tensor]) -> int:
    return int(weights[0].shape[0])


def _exact(x: Tensor, weights: list[Tensor], threshold: float) -> Tensor:
    """weights: the matrix that decides [F, D] (gate, or up where there is no gate) and its bias [F], if it has one."""
    bias = weights[1] if len(weights) > 1 else None
    return F.linear(x, weights[0], bias) > threshold


def _none(x: Tensor, weights: list[Tensor], threshold: float) -> Tensor:
    """weights: any matrix with a row for each neuron."""
    return torch.ones((*x.shape[:-1], _first_rows(weights)), dtype=torch.bool, device=x.device)


_KINDS = {
    kind.name: kind
    for kind in (
        PredictorKind("exact", _exact, _first_rows, row_local=True),
        PredictorKind("none", _none, _first_rows, row_local=True),
    )
}


def predictor_kind(name: str) -> PredictorKind:
    """The kind called `name`. Raises `ValueError` for one that is not known."""
    try:
        return _KINDS[name]
    except KeyError:
        raise ValueError(f"unknown predictor kind {name!r}; known are {', '.join(_KINDS)}") from None


def add_predictor_kind(kind: PredictorKind) -> None:
    """Makes `kind` known by its name to the operator `predict`, to passes and to the verifier.

    Adding the same object again has no effect. Raises `ValueError` where another kind has the name.
    """
    if _KINDS.setdefault(kind.name, kind) is not kind:
        raise ValueError(f"there is a predictor kind {kind.name!r} already")


def predictor_kinds() -> tuple[str, ...]:
    """Names of all kinds."""
    return tuple(_KINDS)
