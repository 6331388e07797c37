"""The predictor that training starts from: reduced-rank regression of what decides, and what it leaves open.

Let t = W x + b be what decides for each neuron (the output of the gate, say), C the covariance of x. Among all matrices
of rank r the one that tells t best in the mean square is W C^½ cut to its r largest singular values, times C^-½
(reduced-rank regression, Izenman 1975). For neuron j that leaves a deviation σ_j between t_j and its estimate; were it
normal, the neuron would fire with the probability Φ((estimate_j - threshold) / σ_j), which is about a logistic function
of 1.7 times that. On the bundled model this start alone finds what plain training finds in 8 epochs.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from picompile.predictors.train.curve import ROWS
from picompile.predictors.train.data import LayerData

# Steeper than 1.7: a loss that weighs firings more than silence pulls boundaries apart. 1.7, 2.5 and 4 gave 1.54, 1.52
# and 1.52 computed neurons for one that fires, at a recall of 99.5 % and rank 64 of the bundled model's third layer.
_STEEPNESS = 2.5

# Directions of x with less than this share of the largest variance are not told from rounding.
_LEAST_VARIANCE = 1e-7
_LEAST_DEVIATION = 1e-3


@dataclass(frozen=True)
class InitialPredictor:
    """A learned predictor in float32: fc1 [r, D], fc2 [F, r], bias [F]."""

    fc1: Tensor
    fc2: Tensor
    bias: Tensor

    def scores(self, x: Tensor) -> Tensor:
        """x [T, D] → logits [T, F]."""
        return torch.addmm(self.bias, x @ self.fc1.T, self.fc2.T)

    def rounded(self) -> "InitialPredictor":
        """With values that float16 holds, as they are stored."""
        return InitialPredictor(
            *(part.clamp(-65504.0, 65504.0).half().float() for part in (self.fc1, self.fc2, self.bias))
        )


class ReducedRankStart:
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

    def of_rank(self, rank: int) -> InitialPredictor:
        """The start of rank `rank`, at most D."""
        directions = self._directions[:, :rank]
        fc1 = (self._to_input @ directions).T.contiguous()
        fc2 = self._whitened @ directions
        left = (self._variance - fc2.square().sum(1)).clamp_min(0).sqrt()
        steepness = _STEEPNESS / left.clamp_min(_LEAST_DEVIATION * self._variance.sqrt()).clamp_min(1e-12)
        fc2 = fc2 * steepness[:, None]
        return InitialPredictor(fc1, fc2.contiguous(), steepness * self._centre - fc2 @ (fc1 @ self._mean))


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


# Gradient descent on a weighted logistic loss.


# What a silent neuron weighs beside a firing of mean contribution, for each share of the contribution that may be
# missed: where more may be missed, more of it is better. Small, so that the loss is about the thresholds that find
# nearly all, but not so small that a low rank forgets to be precise: at a recall of 99.7 %, 0.012, 0.05 and 0.15 gave
# 2.37, 2.29 and 2.30 computed neurons for one that fires in the first layer of the ReGLU model of 21 million parameters
# (rank 96), and 1.25, 1.24 and 1.25 in its second. In the layers of three models 0.05 was the best, or near it.
_SILENCE_OF_MISS = 4.0
_LEAST_SILENCE, _MOST_SILENCE = 0.05, 0.5

_BATCH = 256
_LEAST_STEPS = 16
# Adam's step in units of the root mean square of the matrix, at an inner dimension of _WIDTH; wider ones add up more.
_STEP, _WIDTH = 0.006, 64
_MOMENTUM, _SQUARES, _EPSILON = 0.9, 0.99, 1e-10
_WARM_UP = 0.1


@dataclass(frozen=True)
class FitSettings:
    """How long and how to train. `weighting` and `recall` are those of `TrainOptions`; `train` are the samples."""

    epochs: int
    weighting: str
    recall: float
    seed: int
    train: slice
    device: str = "cpu"

    @property
    def silence(self) -> float | None:
        """What a silent neuron weighs; None where all weigh alike."""
        if self.weighting == "none":
            return None
        return min(_MOST_SILENCE, max(_LEAST_SILENCE, _SILENCE_OF_MISS * (1 - self.recall)))


def fit(
    data: LayerData, contribution: Tensor, name: str, start: InitialPredictor, how: FitSettings
) -> InitialPredictor:
    """Trains a predictor that reads input `name`, from `start`; contribution float16 [S, F], 0 where silent.

    Loss: the logistic loss of each neuron and sample, a firing weighted by its contribution in units of the mean, a
    silence by `how.silence`; with weighting `none` all alike. The gradient is written out, since the loss of 11,008
    neurons on a batch would be held several times over otherwise.
    """
    parts = [part.to(how.device).clone() for part in (start.fc1, start.fc2, start.bias)]
    optimizer = _Adam(parts, _steps_of(start))
    count = how.train.stop - how.train.start
    batch = max(1, min(_BATCH, count // _LEAST_STEPS))
    unit = 1.0 if how.silence is None else _mean_of_firings(contribution[how.train])
    steps = how.epochs * (count // batch)
    generator = torch.Generator().manual_seed(how.seed)
    order = torch.empty(0, dtype=torch.int64)
    for step in range(steps):
        if len(order) < batch:
            order = torch.randperm(count, generator=generator) + how.train.start
        rows, order = order[:batch], order[batch:]
        x = data.inputs(name, rows).to(how.device)
        weight = contribution[rows].to(how.device).float()
        gradients = _gradients(parts, x, weight, unit, how.silence)
        optimizer.step(gradients, _schedule((step + 1) / steps))
    return InitialPredictor(*(part.cpu() for part in parts))


def _gradients(
    parts: list[Tensor], x: Tensor, contribution: Tensor, unit: float, silence: float | None
) -> list[Tensor]:
    fc1, fc2, bias = parts
    inner = x @ fc1.T
    slope = torch.addmm(bias, inner, fc2.T).sigmoid_()
    if silence is None:
        slope -= (contribution > 0).float()
    else:
        weight = contribution / unit
        slope.mul_(weight.masked_fill(weight == 0, silence)).sub_(weight)
    slope /= len(x)
    return [(slope @ fc2).T @ x, slope.T @ inner, slope.sum(0)]


def _mean_of_firings(contribution: Tensor) -> float:
    total, count = 0.0, 0
    for block in torch.split(contribution, 1024):
        total += float(block.double().sum())
        count += int((block > 0).sum())
    return total / count if count else 1.0


def _steps_of(start: InitialPredictor) -> list[float]:
    width = start.fc1.shape[1], start.fc2.shape[1]
    of_matrices = [
        _STEP * float(matrix.square().mean().sqrt()) * math.sqrt(_WIDTH / inner)
        for matrix, inner in zip((start.fc1, start.fc2), width, strict=True)
    ]
    return [*of_matrices, _STEP]


def _schedule(done: float) -> float:
    """Rises for a tenth of the steps, then falls along a cosine to zero."""
    if done < _WARM_UP:
        return done / _WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (done - _WARM_UP) / (1 - _WARM_UP)))


class _Adam:
    """Adam (arXiv 1412.6980) with a step size for each tensor."""

    def __init__(self, parts: list[Tensor], steps: list[float]) -> None:
        self._parts, self._steps = parts, steps
        self._means = [torch.zeros_like(part) for part in parts]
        self._squares = [torch.zeros_like(part) for part in parts]
        self._count = 0

    def step(self, gradients: list[Tensor], factor: float) -> None:
        self._count += 1
        first, second = 1 - _MOMENTUM**self._count, 1 - _SQUARES**self._count
        for part, gradient, mean, square, size in zip(
            self._parts, gradients, self._means, self._squares, self._steps, strict=True
        ):
            mean.lerp_(gradient, 1 - _MOMENTUM)
            square.mul_(_SQUARES).addcmul_(gradient, gradient, value=1 - _SQUARES)
            root = square.sqrt().div_(math.sqrt(second)).add_(_EPSILON)
            part.addcdiv_(mean, root, value=-size * factor / first)
