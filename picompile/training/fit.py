"""Gradient descent on a weighted logistic loss."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from picompile.training.data import LayerData
from picompile.training.start import Weights

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
class Fit:
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


def fit(data: LayerData, contribution: Tensor, name: str, start: Weights, how: Fit) -> Weights:
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
    return Weights(*(part.cpu() for part in parts))


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


def _steps_of(start: Weights) -> list[float]:
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
