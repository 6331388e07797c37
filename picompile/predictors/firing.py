"""Which neurons of a feed-forward block fire on a token."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from picompile.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

# The measures that thresholds are of, h being a neuron's output before the down projection and before a norm across the
# neurons: |h|, or |h| times the length of the neuron's row of down, which is the length of the vector that it adds.
MAGNITUDE = "magnitude"
CONTRIBUTION = "contribution"
MEASURES = (MAGNITUDE, CONTRIBUTION)


@dataclass(frozen=True)
class FiringRule:
    """The firing rule of one layer: a neuron fires if the measure `by` of its output is above `threshold`.

    A threshold of 0 is that of neurons that can be silent: they fire where their output is not zero, by any measure.
    """

    threshold: float = 0.0
    by: str = MAGNITUDE

    def __post_init__(self) -> None:
        """Raise `UsageError` for a measure that is not known."""
        if self.by not in MEASURES:
            raise UsageError(f"unknown measure {self.by!r} of firing; known are {', '.join(MEASURES)}")

    def measure(self, magnitude: "Tensor", lengths: "Tensor") -> "Tensor":
        """Return the values that are compared with the threshold: [tokens, neurons].

        `magnitude` is |h| [tokens, neurons], and `lengths` [neurons] are the lengths of the down rows.
        """
        return magnitude * lengths if self.by == CONTRIBUTION else magnitude

    def fires(self, magnitude: "Tensor", lengths: "Tensor") -> "Tensor":
        """Return the mask of firing neurons, bool [tokens, neurons]; the arguments are those of `measure`."""
        # A product can underflow to zero where its factors do not.
        return magnitude > 0 if self.threshold == 0 else self.measure(magnitude, lengths) > self.threshold
