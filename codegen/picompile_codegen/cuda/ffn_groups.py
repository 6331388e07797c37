"""Groups of neurons: those that one block of threads computes."""

from dataclasses import dataclass

from picompile_codegen.cuda.function import WARP, blocks_for
from picompile_codegen.kernels.tensor import Expr

# A few for each multiprocessor of a large GPU (an RTX 4090 has 128), so that it always has something to read.
_GROUPS = 448
# A thread of the block looks after each.
_LARGEST = 256


@dataclass(frozen=True)
class NeuronGroups:
    """`count` groups of `size`. Neuron n is in group n mod `count`.

    Neurons that are stored side by side fire alike where they were sorted, so that each group has some of all.
    """

    neurons: int
    size: int
    count: int

    @classmethod
    def of(cls, neurons: int) -> "NeuronGroups":
        """Whole warps of neurons."""
        size = min(blocks_for(neurons, WARP * _GROUPS) * WARP, _LARGEST)
        return cls(neurons, size, blocks_for(neurons, size))

    @property
    def places(self) -> int:
        """Of all groups together; a few have no neuron."""
        return self.size * self.count

    def members(self, group: Expr) -> Expr:
        """How many neurons a group has."""
        return (self.neurons - group + (self.count - 1)) // self.count

    def neuron(self, group: Expr, member: Expr) -> Expr:
        """The number of a group's neuron."""
        return member * self.count + group

    def at_place(self, place: Expr) -> Expr:
        """The number of the neuron at a place: places 0 … `size` - 1 are the members of group 0, and so on."""
        return self.neuron(place // self.size, place % self.size)
