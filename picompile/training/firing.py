"""Labels: which neurons fire on which samples, and what each firing contributes."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from picompile.training.data import LayerData

# Samples that are worked on at a time: what is in float32 takes 45 MB with 11,008 neurons.
ROWS = 1024

_SMALLEST, _LARGEST = 2.0**-14, 65504.0


@dataclass(frozen=True)
class Firing:
    """`contribution` float16 [S, F]: 0 where a neuron is silent, else |h| · ‖down row‖ in units of the layer's mean.

    `decided_share` is the share of neurons that their deciding matrix alone does not silence, of the samples `test`:
    what an exact predictor computes.
    """

    contribution: Tensor
    decided_share: float


def measure_firing(data: LayerData, test: slice) -> Firing:
    """Computes all neurons on all samples, a block of samples at a time."""
    lengths = data.down.norm(dim=1)
    contribution = torch.empty(len(data.samples), data.neurons, dtype=torch.float16)
    decided, unit = 0, 0.0
    for start in range(0, len(contribution), ROWS):
        x = data.samples.block(slice(start, start + ROWS))
        magnitude = data.outputs(x).abs_()
        fires = magnitude > data.threshold
        magnitude *= lengths
        # The first block sets the unit, so that float16 holds what is far from 1 in the model's own.
        unit = unit or _mean(magnitude, fires)
        scaled = (magnitude / (unit or 1.0)).clamp_(_SMALLEST, _LARGEST)
        contribution[start : start + ROWS] = torch.where(fires, scaled, torch.zeros_like(scaled))
        if data.silent_at is not None:
            tested = x[max(0, test.start - start) :]
            decided += int((F.linear(tested, *data.deciding) > data.silent_at).sum())
    return Firing(contribution, decided / max(1, (test.stop - test.start) * data.neurons))


def _mean(magnitude: Tensor, fires: Tensor) -> float:
    count = int(fires.sum())
    return float(magnitude[fires].double().mean()) if count else 0.0
