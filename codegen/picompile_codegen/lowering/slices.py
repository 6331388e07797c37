"""Cuts weights of the host into slices, which come to the accelerator one after the other.

A slice has rows of matrices: those of some neurons of a block, or of some outputs of a projection.
"""

from collections.abc import Iterator

# Buffers of the accelerator for weights that come from the host. They take turns.
STAGING = ("staging.0", "staging.1")
# A slice takes 3 ms on a bus of 25 GB/s, a hundred times what it costs to add its result.
STAGING_BYTES = 64 * 2**20
# A slice has a multiple of this many rows: whole tiles of the kernel that multiplies with it.
_MULTIPLE = 256
# Slices of less are not worth a copy of their own.
LEAST = 64


def slices_of(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (first row, rows) of each slice: as few as staging buffers allow, and all about as large.

    A neuron counts as a row of all its weights. A copy waits for the multiplication of the slice before the last.
    Behind a small slice it would wait for a whole large one, and the bus with it.
    """
    most = max(STAGING_BYTES // row_bytes // LEAST * LEAST, LEAST)
    even = -(-rows // -(-rows // most))
    each = min(-(-even // _MULTIPLE) * _MULTIPLE, most)
    for start in range(0, rows, each):
        yield start, min(each, rows - start)
