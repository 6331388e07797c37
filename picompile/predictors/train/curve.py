"""Firing labels of samples, and the trade-off curve of a predictor measured with them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from picompile.predictors.train.data import LayerData

# Samples processed at a time: a float32 tensor of them takes 45 MB with 11,008 neurons.
ROWS = 1024

_SMALLEST, _LARGEST = 2.0**-14, 65504.0


@dataclass(frozen=True)
class FiringLabels:
    """Which neurons fire on which samples, and how much each firing contributes.

    `contribution` float16 [samples, neurons] is 0 where a neuron is silent, else |h| · ‖down row‖ in units of the
    layer's mean. `decided_share` is the share of neurons that the gating matrix alone does not silence on the samples
    `test`: the share that an exact predictor computes.
    """

    contribution: Tensor
    decided_share: float


def measure_firing(data: LayerData, test: slice) -> FiringLabels:
    """Compute all neurons on all samples, `ROWS` samples at a time, and return their labels."""
    lengths = data.down.norm(dim=1)
    contribution = torch.empty(len(data.samples), data.neurons, dtype=torch.float16)
    decided, unit = 0, 0.0
    for start in range(0, len(contribution), ROWS):
        x = data.samples.block(slice(start, start + ROWS))
        magnitude = data.outputs(x).abs_()
        fires = magnitude > data.threshold
        magnitude *= lengths
        # The first block sets the unit, so that float16 can hold contributions far from 1 in the model's own scale.
        unit = unit or _mean_magnitude(magnitude, fires)
        scaled = (magnitude / (unit or 1.0)).clamp_(_SMALLEST, _LARGEST)
        contribution[start : start + ROWS] = torch.where(fires, scaled, torch.zeros_like(scaled))
        if data.silent_at is not None:
            tested = x[max(0, test.start - start) :]
            decided += int((F.linear(tested, *data.gating) > data.silent_at).sum())
    return FiringLabels(contribution, decided / max(1, (test.stop - test.start) * data.neurons))


def _mean_magnitude(magnitude: Tensor, fires: Tensor) -> float:
    count = int(fires.sum())
    return float(magnitude[fires].double().mean()) if count else 0.0


_BINS = 4096
# Bins have equal width in score / (|score| + _BEND): narrow where thresholds lie, and unbounded at both ends.
_BEND = 8.0

# The recalls, weighted by contribution, at which reports show a curve.
_SHOWN_RECALLS = (0.9, 0.95, 0.97, 0.98, 0.985, 0.99, 0.9925, 0.995, 0.9965, 0.998, 0.999, 0.9995)


@dataclass(frozen=True)
class CurvePoint:
    """How a predictor does at one threshold. Shares are of all neurons and tokens."""

    threshold: float
    recall: float
    weighted_recall: float
    precision: float
    computed_share: float
    computed_ratio: float


@dataclass(frozen=True)
class RecallCurve:
    """The trade-off of a predictor: for each threshold, how many neurons it computes and how much it finds.

    Entry i of each tensor [bins] is about the neurons whose score is in bin i or higher: `computed` (int64) counts
    them, `fired` (int64) counts those that fire, `contribution` (float64) sums the contributions of these.
    """

    computed: Tensor
    fired: Tensor
    contribution: Tensor
    total: int

    @property
    def firing_share(self) -> float:
        """The share of all neurons and tokens that fires."""
        return int(self.fired[0]) / max(1, self.total)

    def at(self, weighted_recall: float) -> CurvePoint:
        """Return the point at the highest threshold that finds this share of the contribution.

        If none does, the point is at the lowest threshold, which finds everything.
        """
        found = self.contribution / self.contribution[0].clamp_min(1e-300)
        if float(self.contribution[0]) == 0:
            return self._point(_BINS - 1)
        reached = int((found >= weighted_recall).sum())
        return self._point(max(0, reached - 1))

    def _point(self, index: int) -> CurvePoint:
        computed, fired = int(self.computed[index]), int(self.fired[index])
        all_fired, whole = int(self.fired[0]), float(self.contribution[0])
        return CurvePoint(
            threshold=_lower_edge(index),
            recall=fired / all_fired if all_fired else 1.0,
            weighted_recall=float(self.contribution[index]) / whole if whole else 1.0,
            precision=fired / computed if computed else 1.0,
            computed_share=computed / max(1, self.total),
            computed_ratio=computed / all_fired if all_fired else float(computed > 0),
        )

    def shown(self) -> list[dict[str, Any]]:
        """Return points along the curve, for reports."""
        return [{name: _rounded(value) for name, value in vars(self.at(recall)).items()} for recall in _SHOWN_RECALLS]

    def tensors(self) -> dict[str, Tensor]:
        """Return the curve as the tensors that are stored."""
        total = torch.tensor([self.total])
        return {"computed": self.computed, "fired": self.fired, "found": self.contribution.float(), "total": total}

    @classmethod
    def of_tensors(cls, tensors: dict[str, Tensor]) -> "RecallCurve":
        """Return the curve from the tensors that `tensors` returned."""
        found = tensors["found"].double()
        return cls(tensors["computed"], tensors["fired"], found, int(tensors["total"]))


def measure_curve(blocks: Iterator[tuple[Tensor, Tensor]]) -> RecallCurve:
    """Return the curve of a predictor.

    `blocks` are its scores (float32) and the contributions (float16), both [tokens, neurons], of held-out samples.
    """
    counts = torch.zeros(2, _BINS, dtype=torch.int64)
    contribution = torch.zeros(_BINS, dtype=torch.float64)
    for scores, block in blocks:
        bins, block = _bin(scores).flatten(), block.flatten().float()
        counts[0] += torch.bincount(bins, minlength=_BINS)
        fired = bins[block > 0]
        counts[1] += torch.bincount(fired, minlength=_BINS)
        contribution += torch.bincount(fired, weights=block[block > 0].double(), minlength=_BINS)
    above: Callable[[Tensor], Tensor] = lambda values: values.flip(0).cumsum(0).flip(0)  # noqa: E731
    whole = above(contribution)
    # In units of the whole, so that float32 can hold it.
    return RecallCurve(above(counts[0]), above(counts[1]), whole / whole[0].clamp_min(1e-300), int(counts[0].sum()))


def _bin(scores: Tensor) -> Tensor:
    bent = scores / (scores.abs() + _BEND)
    return ((bent + 1) * (_BINS / 2)).long().clamp_(0, _BINS - 1)


def _lower_edge(index: int) -> float:
    """Return the score at which bin `index` begins; for the first bin, a number below every score."""
    if index == 0:
        return -1e4
    bent = index * 2 / _BINS - 1
    return _BEND * bent / (1 - abs(bent))


def _rounded(value: float) -> float:
    return round(value, 6)
