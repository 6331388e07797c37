"""Training of one predictor: its start by reduced-rank regression, and gradient descent from there.

Let t = W x + b be the value that decides whether each neuron fires (the output of the gate, say), and C the covariance
of x. Among all matrices of rank r, the one that predicts t with the least mean square error is W C^½ cut to its r
largest singular values, times C^-½ (reduced-rank regression, Izenman 1975). For neuron j that leaves a deviation σ_j
between t_j and its estimate. If it is normally distributed, the neuron fires with the probability
Φ((estimate_j - threshold) / σ_j), which is about a logistic function of 1.7 times that. On the bundled model this start
alone is as good as 8 epochs of plain training.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from picompile.predictors.train.data import ROWS, LayerData
from picompile.products import products_in_bf16

# Steeper than 1.7: a loss that weighs firings more than silence pulls boundaries apart. 1.7, 2.5 and 4 gave 1.54, 1.52
# and 1.52 computed neurons for one that fires, at a recall of 99.5 % and rank 64 of the bundled model's third layer.
_STEEPNESS = 2.5

# Directions of x with less than this share of the largest variance cannot be told from rounding.
_LEAST_VARIANCE = 1e-7
_LEAST_DEVIATION = 1e-3


@dataclass(frozen=True)
class InitialPredictor:
    """A learned predictor in float32: fc1 [rank, hidden], fc2 [neurons, rank], bias [neurons]."""

    fc1: Tensor
    fc2: Tensor
    bias: Tensor

    def scores(self, x: Tensor) -> Tensor:
        """Return the logits of x: [tokens, hidden] → [tokens, neurons]."""
        return torch.addmm(self.bias, x @ self.fc1.T, self.fc2.T)

    def rounded(self) -> "InitialPredictor":
        """Return the predictor with its values rounded to float16, as they are stored."""
        return InitialPredictor(
            *(part.clamp(-65504.0, 65504.0).half().float() for part in (self.fc1, self.fc2, self.bias))
        )


class ReducedRankStart:
    """The start of training, at any rank, for one layer and one input; computed from the samples `train`."""

    def __init__(self, data: LayerData, contribution: Tensor, name: str, train: slice) -> None:
        self._mean, covariance = _moments(data, name, train)
        if data.one_sided and name == "block":
            matrix, bias = data.gating
            centre = matrix @ self._mean + (0.0 if bias is None else bias) - (data.silent_at or 0.0)
            variance = None
        else:
            matrix, centre, variance = _regression(
                data, contribution, name, train, mean=self._mean, covariance=covariance
            )
        values, vectors = torch.linalg.eigh(covariance)
        root = values.clamp_min(_LEAST_VARIANCE * float(values[-1].clamp_min(1e-30))).sqrt()
        self._whitened = (matrix @ vectors) * root
        # Right singular vectors from the smaller product: [hidden, hidden] instead of [neurons, hidden].
        self._directions = torch.linalg.eigh(self._whitened.T @ self._whitened).eigenvectors.flip(1)
        self._to_input = vectors / root
        explained = self._whitened.square().sum(1)
        self._variance = explained if variance is None else variance
        self._centre = centre

    def of_rank(self, rank: int) -> InitialPredictor:
        """Return the start of rank `rank`, which is at most the hidden size."""
        directions = self._directions[:, :rank]
        fc1 = (self._to_input @ directions).T.contiguous()
        fc2 = self._whitened @ directions
        left = (self._variance - fc2.square().sum(1)).clamp_min(0).sqrt()
        steepness = _STEEPNESS / left.clamp_min(_LEAST_DEVIATION * self._variance.sqrt()).clamp_min(1e-12)
        fc2 = fc2 * steepness[:, None]
        return InitialPredictor(fc1, fc2.contiguous(), steepness * self._centre - fc2 @ (fc1 @ self._mean))


def _moments(data: LayerData, name: str, train: slice) -> tuple[Tensor, Tensor]:
    """Return mean [hidden] and covariance [hidden, hidden] of the input, in float32."""
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
    """Regress the deciding value on the input by least squares.

    Returns the matrix [neurons, hidden], and the centre and the variance of the deciding value, both [neurons]. If no
    single matrix decides, the deciding value is whether the neuron fires, in units of its deviation. Of experts, this
    is known of chosen ones alone.
    """
    cross = torch.zeros(data.neurons, data.hidden)
    first, second = torch.zeros(2, data.neurons, dtype=torch.float64)
    gains = None if data.one_sided else data.gains
    experts = 1 if gains is None else gains.shape[1]
    count, shift = torch.zeros(experts), torch.zeros(experts, data.hidden)
    for start in range(train.start, train.stop, ROWS):
        rows = slice(start, min(start + ROWS, train.stop))
        target, x = _gating_target(data, contribution, rows), data.inputs(name, rows) - mean
        known = torch.ones(len(x), 1) if gains is None else (gains[rows] != 0).float()
        count += known.sum(0)
        shift.addmm_(known.T, x)
        cross.addmm_(target.T, x)
        first += target.sum(0)
        second += target.square().sum(0)
    count, shift = (each.repeat_interleave(data.neurons // experts, dim=0) for each in (count, shift))
    # A neuron of which nothing is known counts as one that fires always.
    first, count = torch.where(count == 0, 1.0, first), count.clamp_min(1)
    centre = (first / count).float()
    variance = (second / count - (first / count) ** 2).clamp_min(0).float()
    ridge = 1e-4 * float(covariance.diagonal().mean()) + 1e-12
    # Zero is the mean of x over all samples, not over those that chose an expert.
    cross = (cross - centre[:, None] * shift) / count[:, None]
    solved = torch.linalg.solve(covariance + ridge * torch.eye(data.hidden), cross.T).T
    if data.one_sided:
        return solved, centre, variance
    deviation = variance.sqrt().clamp_min(count**-0.5)
    # Halfway between never and always, a neuron is as likely to fire as not.
    return solved / deviation[:, None], (centre - 0.5) / deviation, variance / deviation.square()


def _gating_target(data: LayerData, contribution: Tensor, rows: slice) -> Tensor:
    if not data.one_sided:
        return (contribution[rows] > 0).float()
    matrix, bias = data.gating
    decided = torch.nn.functional.linear(data.samples.block(rows), matrix, bias)
    return decided - (data.silent_at or 0.0)


# The logistic loss weighs a silent neuron by this factor times the share of the contribution that may be missed; a
# firing of mean contribution weighs 1. The weight is small, so that the loss is about the thresholds that find nearly
# everything, but not so small that a low rank loses its precision: at a recall of 99.7 %, 0.012, 0.05 and 0.15 gave
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
class JobSettings:
    """The `TrainOptions` that the candidates of a layer depend on, and the layer's skewness."""

    kind: str
    input: str
    rank: int | None
    weighting: str
    epochs: int
    recall: float
    seed: int
    device: str
    skewness: float
    bf16: bool = False

    @property
    def silence(self) -> float | None:
        """The weight of a silent neuron in the loss; None if all weigh the same."""
        if self.weighting == "none":
            return None
        return min(_MOST_SILENCE, max(_LEAST_SILENCE, _SILENCE_OF_MISS * (1 - self.recall)))


def fit(
    data: LayerData, contribution: Tensor, name: str, start: InitialPredictor, how: JobSettings, train: slice
) -> InitialPredictor:
    """Train a predictor that reads the input `name`, from `start`, and return it.

    The loss is the logistic loss of each neuron and sample. A firing is weighted by its contribution in units of the
    mean, a silent neuron by `how.silence`; with weighting `none` all weigh the same. Neurons of experts that are not
    chosen weigh nothing. The gradient is written out,
    because autograd would hold the loss of 11,008 neurons on a minibatch several times.

    Args:
        data: The layer's data.
        contribution: float16 [samples, neurons], 0 where a neuron is silent.
        name: What the predictor reads: one of `data.input_choices`.
        start: The predictor to start from.
        how: The settings.
        train: The samples to train on.
    """
    parts = [part.to(how.device).clone() for part in (start.fc1, start.fc2, start.bias)]
    optimizer = _Adam(parts, _step_sizes(start))
    count = train.stop - train.start
    batch = max(1, min(_BATCH, count // _LEAST_STEPS))
    unit = 1.0 if how.silence is None else _mean_firing_contribution(contribution[train])
    steps = how.epochs * (count // batch)
    generator = torch.Generator().manual_seed(how.seed * 1000 + data.layer)
    order = torch.empty(0, dtype=torch.int64)
    for step in range(steps):
        if len(order) < batch:
            order = torch.randperm(count, generator=generator) + train.start
        rows, order = order[:batch], order[batch:]
        x = data.inputs(name, rows).to(how.device)
        weight = contribution[rows].to(how.device).float()
        with products_in_bf16(how.bf16):
            gradients = _gradients(parts, x, weight, data.candidates(rows), unit=unit, silence=how.silence)
        optimizer.step(gradients, _schedule((step + 1) / steps))
    return InitialPredictor(*(part.cpu() for part in parts))


def _gradients(
    parts: list[Tensor],
    x: Tensor,
    contribution: Tensor,
    counted: Tensor | None,
    unit: float,
    silence: float | None,
) -> list[Tensor]:
    fc1, fc2, bias = parts
    inner = x @ fc1.T
    slope = torch.addmm(bias, inner, fc2.T).sigmoid_()
    if silence is None:
        slope -= (contribution > 0).float()
    else:
        weight = contribution / unit
        slope.mul_(weight.masked_fill(weight == 0, silence)).sub_(weight)
    if counted is not None:
        slope *= counted.to(slope.device)
    slope /= len(x)
    return [(slope @ fc2).T @ x, slope.T @ inner, slope.sum(0)]


def _mean_firing_contribution(contribution: Tensor) -> float:
    total, count = 0.0, 0
    for block in torch.split(contribution, 1024):
        total += float(block.double().sum())
        count += int((block > 0).sum())
    return total / count if count else 1.0


def _step_sizes(start: InitialPredictor) -> list[float]:
    width = start.fc1.shape[1], start.fc2.shape[1]
    of_matrices = [
        _STEP * float(matrix.square().mean().sqrt()) * math.sqrt(_WIDTH / inner)
        for matrix, inner in zip((start.fc1, start.fc2), width, strict=True)
    ]
    return [*of_matrices, _STEP]


def _schedule(done: float) -> float:
    """Return the factor of the step size: it rises for a tenth of the steps, then falls to zero along a cosine."""
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
