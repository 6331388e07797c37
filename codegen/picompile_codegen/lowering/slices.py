"""How the cold neurons of a block are cut into slices, whose weights come to the accelerator one after the other."""

from collections.abc import Iterator

# A slice takes 3 ms on a bus of 25 GB/s, a hundred times what it costs to add its result.
STAGE_BYTES = 64 * 2**20
# A slice has a multiple of this many neurons: whole tiles of the kernel that multiplies with it.
_MULTIPLE = 256
# Slices of less are not worth a copy of their own.
LEAST = 64


def slices_of(neurons: int, neuron_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (first neuron, neurons) of each slice: as few as stages allow, and all about as large.

    A copy waits for the multiplication of the slice before the last. Behind a small slice it would wait for a whole
    large one, and the bus with it.
    """
    most = max(STAGE_BYTES // neuron_bytes // LEAST * LEAST, LEAST)
    even = -(-neurons // -(-neurons // most))
    each = min(-(-even // _MULTIPLE) * _MULTIPLE, most)
    for start in range(0, neurons, each):
        yield start, min(each, neurons - start)
