"""Distances of distributions equal those computed one token and one probability at a time."""

import math

import pytest
import torch
from torch import Tensor

from picompile.accuracy.distances import measure_tokens


def _log_chances(row: Tensor) -> list[float]:
    values = row.double().tolist()
    highest = max(values)
    total = math.log(math.fsum(math.exp(value - highest) for value in values)) + highest
    return [value - total for value in values]


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_figures_are_those_of_a_slow_reference(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    reference = 3 * torch.randn(131, 57, generator=generator)
    logits = reference + scale * torch.randn(131, 57, generator=generator)
    targets = torch.randint(57, (131,), generator=generator)
    found = measure_tokens(reference, logits, targets)
    for row in range(131):
        p, q = _log_chances(reference[row]), _log_chances(logits[row])
        target = int(targets[row])
        assert found.reference_nll[row] == pytest.approx(-p[target], rel=1e-12)
        assert found.nll[row] == pytest.approx(-q[target], rel=1e-12)
        kl = math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
        assert found.kl[row] == pytest.approx(kl, rel=1e-9, abs=1e-15)
        assert found.same_top[row] == (p.index(max(p)) == q.index(max(q)))


def test_tokens_that_are_ruled_out() -> None:
    never = -math.inf
    reference, target = torch.tensor([[0.0, 1, never]]), torch.tensor([0])
    same = measure_tokens(reference, torch.tensor([[0.0, 1, never]]), target)
    other = measure_tokens(reference, torch.tensor([[0.0, 1, 1]]), target)
    ruled_out = measure_tokens(reference, torch.tensor([[0.0, never, 1]]), target)
    assert same.kl[0] == 0 and math.isfinite(other.kl[0]) and other.kl[0] > 0
    assert ruled_out.kl[0] == math.inf
