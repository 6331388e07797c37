"""The rule by which neurons fire."""

import pytest
import torch

from picompile.errors import UsageError
from picompile.predictors.firing import MEASURES, FiringRule

MAGNITUDE = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.5, 1.0]])
LENGTHS = torch.tensor([1.0, 3.0, 0.25])


def test_magnitude_and_contribution_are_compared_with_the_threshold() -> None:
    assert FiringRule(1.0).fires(MAGNITUDE, LENGTHS).tolist() == [[False, False, True], [True, False, False]]
    by_contribution = FiringRule(1.0, "contribution").fires(MAGNITUDE, LENGTHS)
    assert by_contribution.tolist() == [[False, True, False], [True, True, False]]


@pytest.mark.parametrize("by", MEASURES)
def test_without_a_threshold_every_output_but_zero_fires(by: str) -> None:
    """Even where the product underflows: predictors of ReLU models are exact about zero."""
    magnitude, lengths = torch.tensor([[0.0, 1e-30, 1.0]]), torch.tensor([1.0, 1e-30, 0.0])
    assert FiringRule(by=by).fires(magnitude, lengths).tolist() == [[False, True, True]]


def test_an_unknown_measure_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown measure 'energy' of firing; known are magnitude, contribution"):
        FiringRule(by="energy")
