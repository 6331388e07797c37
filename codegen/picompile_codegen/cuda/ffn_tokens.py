"""The feed-forward block of one token, or of a few sequences' next tokens with a mask each.

1. Groups of neurons are computed, a block for each, as far as they are asked for (`ffn_hidden.py`).
2. The rows of down of those that fired are added up, a block for each tile of columns and slice of neurons
   (`ffn_down.py`).
3. The slices are added up.

All sums have an order that the sizes fix. So has then every bit of y, whichever thread comes first. There is no list of
all neurons that fired: a launch that made one would take longer than it takes each block to make the list of its own.

Blocks of all tokens for the same neurons run at about the same time: what one has read, the next finds in the cache.
"""

from picompile_codegen.cuda.dot import in_parts
from picompile_codegen.cuda.ffn_arguments import CudaFfn
from picompile_codegen.cuda.ffn_down import DOWN_THREADS, SUM_COLUMNS, SUM_THREADS, DownPlan, add_rows, add_slices
from picompile_codegen.cuda.ffn_groups import NeuronGroups
from picompile_codegen.cuda.ffn_hidden import HIDDEN_THREADS, compute_hidden
from picompile_codegen.cuda.function import CudaFunction, blocks_for
from picompile_codegen.kernels.tensor import when


def ffn_tokens(function: CudaFunction, block: CudaFfn) -> None:
    """Declares the rest of the arguments and writes the launches."""
    rows = block.shape.rows
    groups = NeuronGroups.of(block.shape.neurons)
    plan = DownPlan.of(block.bundle, groups.places, rows)
    hidden = function.scratch("hidden", "float32", rows, groups.places)
    slices = function.scratch("slices", "float32", rows * plan.slices, plan.tiles * plan.width)
    y = function.floats("y", rows, block.shape.dim)
    with (
        function.launch(grid=(rows, groups.count), block=HIDDEN_THREADS, resident=_resident(block)) as place,
        when(place.block < function.tokens(rows)),
    ):
        compute_hidden(block, groups, hidden, place)
    with (
        function.launch(grid=(rows * plan.tiles, plan.slices), block=DOWN_THREADS) as place,
        when(place.block % rows < function.tokens(rows)),
    ):
        add_rows(block, groups, plan, hidden, slices, place)
    with (
        function.launch(grid=(blocks_for(plan.tiles * plan.width, SUM_COLUMNS), rows), block=SUM_THREADS) as place,
        when(place.block_y < function.tokens(rows)),
    ):
        add_slices(block, plan, slices, y, place)


def _resident(block: CudaFfn) -> int:
    """Return how many blocks of `compute_hidden` shall fit a multiprocessor; 0 leaves it to the compiler.

    In `exact` with q4 ptxas takes up to 71 registers, where 64 need no spilling and leave room for a fourth block.
    Where x is in several parts, ptxas spills up to 24 bytes to get from 95 registers to 80, hence two blocks there.
    """
    if not block.shape.is_exact or block.bundle.format != "q4":
        return 0
    return 2 if in_parts(block.shape.dim) else 4
