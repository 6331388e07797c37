"""The predictor that training starts from: reduced-rank regression of what decides, and what it leaves open.

Let t = W x + b be what decides for each neuron (the output of the gate, say), C the covariance of x. Among all matrices
of rank r the one that tells t best in the mean square is W C^½ cut to its r largest singular values, times C^-½
(reduced-rank regression, Izenman 1975). For neuron j that leaves a deviation σ_j between t_j and its estimate; were it
normal, the neuron would fire with the probability Φ((estimate_j - threshold) / σ_j), which is about a logistic function
of 1.7 times that. On the bundled model this start alone finds what plain training finds in 8 epochs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from picompile.training.data import LayerData
from picompile.training.firing import ROWS

# Steeper than 1.7: a loss that weighs firings more than silence pulls boundaries apart. 1.7, 2.5 and 4 gave 1.54, 1.52
# and 1.52 computed neurons for one that fires, at a recall of 99.5 % and rank 64 of the bundled model's third layer.
_STEEPNESS = 2.5

# Directions of x with less than this share of the largest variance are not told from rounding.
_LEAST_VARIANCE = 1e-7
_LEAST_DEVIATION = 1e-3


@dataclass(frozen=True)
class Weights:
    """A learned predictor in float32: fc1 [r, D], fc2 [F, r], bias [F]."""

    fc1: Tensor
    fc2: Tensor
    bias: Tensor

    def scores(self, x: Tensor) -> Tensor:
        """x [T, D] → logits [T, F]."""
        return torch.addmm(self.bias, x @ self.fc1.T, self.fc2.T)

    def rounded(self) -> "Weights":
        """With values that float16 holds, as they are stored."""
        return Weights(*(part.clamp(-65504.0, 65504.0).half().float() for part in (self.fc1, self.fc2, self.bias)))


class Start:
    """Starts of any rank for one layer and one input, from the samples `train` (int64, or a slice)."""

    def __init__(self, data: LayerData, contribution: Tensor, name: str, train: slice) -> None:
        self._mean, covariance = _moments(data, name, train)
        if data.one_sided and name == "block":
            matrix, bias = data.deciding
            centre = matrix @ self._mean + (0.0 if bias is None else bias) - (data.silent_at or 0.0)
            variance = None
        else:
            matrix, centre, variance = _regression(data, contribution, name, train, self._mean, covariance)
        values, vectors = torch.linalg.eigh(covariance)
        root = values.clamp_min(_LEAST_VARIANCE * float(values[-1].clamp_min(1e-30))).sqrt()
        self._whitened = (matrix @ vectors) * root
        # Right singular vectors by the smaller product: [D, D] instead of [F, D].
        self._directions = torch.linalg.eigh(self._whitened.T @ self._whitened).eigenvectors.flip(1)
        self._to_input = vectors / root
        explained = self._whitened.square().sum(1)
        self._variance = explained if variance is None else variance
        self._centre = centre

    def of_rank(self, rank: int) -> Weights:
        """The start of rank `rank`, at most D."""
        directions = self._directions[:, :rank]
        fc1 = (self._to_input @ directions).T.contiguous()
        fc2 = self._whitened @ directions
        left = (self._variance - fc2.square().sum(1)).clamp_min(0).sqrt()
        steepness = _STEEPNESS / left.clamp_min(_LEAST_DEVIATION * self._variance.sqrt()).clamp_min(1e-12)
        fc2 = fc2 * steepness[:, None]
        return Weights(fc1, fc2.contiguous(), steepness * self._centre - fc2 @ (fc1 @ self._mean))


def _moments(data: LayerData, name: str, train: slice) -> tuple[Tensor, Tensor]:
    """Mean [D] and covariance [D, D] of the input, in float32."""
    total = torch.zeros(data.hidden, dtype=torch.float64)
    rows = range(train.start, train.stop, ROWS)
    for start in rows:
        total += data.inputs(name, slice(start, min(start + ROWS, train.stop))).sum(0)
    count = train.stop - train.start
    mean = (total / count).float()
    covariance = torch.zeros(data.hidden, data.hidden)
    for start in rows:
        centred = data.inputs(name, slice(start, min(start + ROWS, train.stop))) - mean
        covariance.addmm_(centred.T, centred)
    return mean, covariance / count


def _regression(
    data: LayerData, contribution: Tensor, name: str, train: slice, mean: Tensor, covariance: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Least squares of what decides from the input: matrix [F, D], centre [F] and variance [F] of what decides.

    Where no single matrix decides, it is whether the neuron fires, in units of its deviation.
    """
    cross = torch.zeros(data.neurons, data.hidden)
    first, second = torch.zeros(2, data.neurons, dtype=torch.float64)
    for start in range(train.start, train.stop, ROWS):
        rows = slice(start, min(start + ROWS, train.stop))
        target = _target(data, contribution, rows)
        cross.addmm_(target.T, data.inputs(name, rows) - mean)
        first += target.sum(0)
        second += target.square().sum(0)
    count = train.stop - train.start
    centre = (first / count).float()
    variance = (second / count - (first / count) ** 2).clamp_min(0).float()
    ridge = 1e-4 * float(covariance.diagonal().mean()) + 1e-12
    solved = torch.linalg.solve(covariance + ridge * torch.eye(data.hidden), cross.T / count).T
    if data.one_sided:
        return solved, centre, variance
    deviation = variance.sqrt().clamp_min(count**-0.5)
    # Half of the way from never to always is where a neuron fires as likely as not.
    return solved / deviation[:, None], (centre - 0.5) / deviation, variance / deviation.square()


def _target(data: LayerData, contribution: Tensor, rows: slice) -> Tensor:
    if not data.one_sided:
        return (contribution[rows] > 0).float()
    matrix, bias = data.deciding
    decided = torch.nn.functional.linear(data.samples.block(rows), matrix, bias)
    return decided - (data.silent_at or 0.0)
