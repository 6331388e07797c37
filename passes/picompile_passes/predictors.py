"""Predictor kinds: `PredictorKind`, the built-in kinds, and those of plug-ins.

| kind | weights | a neuron fires where | loses |
| --- | --- | --- | --- |
| `exact` | the gating matrix and its bias, if any | the activation of its gate is not zero (ReLU family) | nothing |
| `none` | any matrix with a row for each neuron | always | nothing |
| `learned` | fc1 [R, D], fc2 [F, R], bias [F] | fc2 · (fc1 · x) + bias > threshold | what training missed |
| `learned-relu` | the same | fc2 · relu(fc1 · x) + bias > threshold | what training missed |
| `sign` | the gating matrix [F, D] | enough of its columns agree with x in sign | what the signs hide |

The gating matrix is the gate, or up where there is no gate. `learned-relu` is the form of PowerInfer (arXiv
2312.12456) and Deja Vu (arXiv 2310.17157). `sign` is that of SparseInfer (arXiv 2411.12692), and needs no training.

A package offers a kind by an entry point of the group `picompile.predictors`, which has the kind's name and leads to a
`PredictorKind`; it is imported when a graph or a pass names it. A program adds one by `PREDICTOR_KINDS.add`, before it
makes graphs that use it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from picompile_passes.plugins import Registry


@dataclass(frozen=True)
class PredictorKind:
    """One method of predicting which neurons of a block fire.

    Attributes:
        name: How graphs and passes call it.
        evaluate: `evaluate(x [T, D], weights, threshold)` → bool [T, neurons].
        neurons: `neurons(weights)` → how many neurons these weights predict.
        row_local: Whether a neuron is predicted from that neuron's rows of the weights alone, so that a partition may
            split the weights with the rows of the block.
        parameters: The kind's own weights by name, in the order of `weights`, each with a letter for each of its
            dimensions: F neurons, D columns of x, R the rank. Such a kind may read another input than its block's x.
            A kind without any gets the gating matrix of the block.
        threshold: The default threshold.
        reads_bias: Whether a kind without parameters also gets the bias of the gating matrix, where it has one.
        lossless: Whether no neuron that fires is left out. Such a kind has no threshold to choose, and needs no check.
        in_block: Whether the block's own kernel decides, so that no kernel makes a mask before it.
    """

    name: str
    evaluate: Callable[[Tensor, list[Tensor], float], Tensor]
    neurons: Callable[[list[Tensor]], int]
    row_local: bool
    parameters: Mapping[str, str] | None = None
    threshold: float = 0.0
    reads_bias: bool = False
    lossless: bool = False
    in_block: bool = False

    @property
    def has_rank(self) -> bool:
        """Whether the shapes of its parameters depend on a rank."""
        return any("R" in letters for letters in (self.parameters or {}).values())


def first_rows(weights: list[Tensor]) -> int:
    """Return how many neurons a kind predicts whose first weight has one row for each neuron."""
    return int(weights[0].shape[0])


def _exact(x: Tensor, weights: list[Tensor], threshold: float) -> Tensor:
    bias = weights[1] if len(weights) > 1 else None
    return F.linear(x, weights[0], bias) > threshold


def _none(x: Tensor, weights: list[Tensor], threshold: float) -> Tensor:
    return torch.ones((*x.shape[:-1], first_rows(weights)), dtype=torch.bool, device=x.device)


def _learned(x: Tensor, weights: list[Tensor], threshold: float) -> Tensor:
    fc1, fc2, bias = weights
    return F.linear(F.linear(x, fc1), fc2, bias) > threshold


def _learned_relu(x: Tensor, weights: list[Tensor], threshold: float) -> Tensor:
    fc1, fc2, bias = weights
    return F.linear(F.relu(F.linear(x, fc1)), fc2, bias) > threshold


def sign_limit(columns: int, threshold: float) -> int:
    """Return the most columns that may agree in sign while a neuron of kind `sign` stays silent; with more it fires.

    The share of agreeing columns exceeds `threshold` exactly where their number exceeds this. The limit is a whole
    number, so that eager PyTorch and kernels agree on shares that no float represents.
    """
    return math.floor(threshold * columns)


def _sign(x: Tensor, weights: list[Tensor], threshold: float) -> Tensor:
    """Count agreeing columns by the product of signs, which is agreeing - differing columns: exact below 2^24.

    0 and -0 count as positive.
    """
    (w,) = weights
    columns = w.shape[1]
    product = F.linear(_signs(x), _signs(w))
    return (product + columns) / 2 > sign_limit(columns, threshold)


def _signs(values: Tensor) -> Tensor:
    return torch.where(values < 0, -1.0, 1.0)


_OF_LEARNED = {"fc1": "RD", "fc2": "FR", "bias": "F"}


def _rows_of_fc2(weights: list[Tensor]) -> int:
    return int(weights[1].shape[0])


_BUILTIN = (
    PredictorKind("exact", _exact, first_rows, row_local=True, reads_bias=True, lossless=True, in_block=True),
    PredictorKind("none", _none, first_rows, row_local=True, lossless=True, in_block=True),
    PredictorKind("learned", _learned, _rows_of_fc2, row_local=False, parameters=_OF_LEARNED),
    PredictorKind("learned-relu", _learned_relu, _rows_of_fc2, row_local=False, parameters=_OF_LEARNED),
    # Half of the columns: above it the sum is more likely positive than not.
    PredictorKind("sign", _sign, first_rows, row_local=True, threshold=0.5),
)

PREDICTOR_KINDS = Registry[PredictorKind]("predictor kind", "picompile.predictors", PredictorKind, _BUILTIN)


def predictor_kind(name: str) -> PredictorKind:
    """Return the kind called `name`.

    Raises:
        ValueError: If no such kind is known.
        RegistryError: If a package offers it, and it does not import, is no `PredictorKind`, or shares its name.
    """
    try:
        return PREDICTOR_KINDS[name]
    except KeyError:
        raise ValueError(f"unknown predictor kind {name!r}; known are {', '.join(PREDICTOR_KINDS)}") from None
