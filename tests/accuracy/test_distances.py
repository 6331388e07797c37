"""Distances of distributions equal those computed one token and one probability at a time."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from picompile.accuracy.distances import join_tokens, measure_tokens


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


def test_the_divergence_is_from_the_reference() -> None:
    sure, unsure = torch.tensor([[20.0, 0, 0]]), torch.tensor([[0.0, 0, 0]])
    target = torch.tensor([0])
    assert measure_tokens(sure, unsure, target).kl[0] == pytest.approx(math.log(3), rel=1e-6)
    assert measure_tokens(unsure, sure, target).kl[0] > 10
    logits = torch.randn(70, 40, generator=torch.Generator().manual_seed(1))
    found = measure_tokens(logits, logits + 5, torch.zeros(70, dtype=torch.int64))
    assert found.kl.max() < 1e-12 and found.kl.min() >= 0 and found.same_top.all()


def test_tokens_that_are_ruled_out() -> None:
    never = -math.inf
    reference, target = torch.tensor([[0.0, 1, never]]), torch.tensor([0])
    same = measure_tokens(reference, torch.tensor([[0.0, 1, never]]), target)
    other = measure_tokens(reference, torch.tensor([[0.0, 1, 1]]), target)
    ruled_out = measure_tokens(reference, torch.tensor([[0.0, never, 1]]), target)
    assert same.kl[0] == 0 and math.isfinite(other.kl[0]) and other.kl[0] > 0
    assert ruled_out.kl[0] == math.inf


def test_parts_are_joined_in_order() -> None:
    logits = torch.randn(9, 5, generator=torch.Generator().manual_seed(2))
    other, targets = logits.flip(0), torch.arange(9) % 5
    whole = measure_tokens(logits, other, targets)
    parts = (slice(0, 2), slice(2, 9))
    joined = join_tokens(measure_tokens(logits[part], other[part], targets[part]) for part in parts)
    for name in ("reference_nll", "nll", "kl", "same_top"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(joined, name))
