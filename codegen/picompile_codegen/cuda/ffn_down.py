"""Sums of rows of down times their neurons' outputs: by slices for one token, by tiles for many tokens.

For one token, a block has a tile of columns and a slice of the neurons. A lane has 16 bytes of each row, and its warp a
few rows at a time, so that neighbouring lanes read neighbouring addresses and many reads are under way. Warps take rows
in turns and are added up in shared memory, in a fixed order. The last block of a tile adds up its slices, in order.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace

from tvm import tirx

from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, minimum, select, when
from picompile_codegen.cuda.ffn_hidden import CudaFfn, NeuronGroups
from picompile_codegen.cuda.function import WARP, CudaFunction, ThreadIndex, blocks_for
from picompile_codegen.cuda.halves import Halves
from picompile_codegen.cuda.matrix import CudaMatrix, load_lanes
from picompile_codegen.cuda.memory import (
    Numbering,
    barrier,
    block_sum,
    last_block,
    loads_first,
    registers,
    shared,
    zero_registers,
)
from picompile_codegen.cuda.mma import LARGE, SMALL, STEP, ColumnWeights, ProductTile, multiply

DOWN_THREADS = 256
_WARPS = DOWN_THREADS // WARP
# Rows that a warp reads at a time.
_TOGETHER = 4
# Places of a slice that are listed at a time.
_LISTED = 1024
# The blocks of a token, if it has enough neurons, and the fewest neurons that are worth a block.
_BLOCKS, _FEWEST = 256, 128
# With this many tokens each needs fewer blocks.
_MANY_TOKENS = 4
# Elements of a slice that a thread adds up together, 16 bytes, and slices that it reads together.
_LANES, _SLICES_TOGETHER = 4, 8
_ALWAYS = tirx.IntImm("bool", 1)


@dataclass(frozen=True)
class DownPlan:
    """`tiles` of `width` columns and `slices` of `places` places of `NeuronGroups`.

    A tile's column 32 · i + j, in slices, is the i-th weight of lane j: its column j · (width / 32) + i. With `squares`
    the column behind all tiles has the sum of h² of a slice.
    """

    tiles: int
    width: int
    slices: int
    places: int
    all_places: int
    squares: bool

    @classmethod
    def of(cls, bundle: CudaMatrix, all_places: int, rows: int, *, squares: bool) -> "DownPlan":
        """Return the plan for a bundle whose neurons have `all_places` places."""
        tiles = blocks_for(bundle.units, WARP)
        wanted = blocks_for(_BLOCKS, tiles * min(rows, _MANY_TOKENS))
        wanted = min(wanted, blocks_for(all_places, _FEWEST))
        places = blocks_for(blocks_for(all_places, wanted), WARP) * WARP
        width = WARP * bundle.unit_weights
        return cls(tiles, width, blocks_for(all_places, places), places, all_places, squares)

    @property
    def columns(self) -> int:
        """Columns of a slice: those of all tiles, and that of the squares."""
        return self.tiles * self.width + self.squares * _LANES


@dataclass(frozen=True)
class _Slice:
    """The work of a thread block: its token's hidden values, its range, and its list of rows in shared memory."""

    token: Expr
    start: Expr
    stop: Expr
    rows: KernelTensor
    outputs: KernelTensor
    numbering: Numbering
    hidden: KernelTensor


def add_down(
    function: CudaFunction, block: CudaFfn, groups: NeuronGroups, plan: DownPlan, hidden: KernelTensor
) -> None:
    """Write the launch of y = hidden · down + bias, and declare its memory."""
    rows = block.spec.rows
    slices = function.scratch("slices", "float32", rows * plan.slices, plan.columns)
    tickets = function.tickets(rows * plan.tiles)
    with (
        function.launch(grid=(rows * plan.tiles, plan.slices), block=DOWN_THREADS) as place,
        when(place.block % rows < function.tokens(rows)),
    ):
        _add_rows(
            block, groups=replace(groups, neurons=block.neurons()), plan=plan, hidden=hidden, slices=slices, place=place
        )
        with when(last_block(tickets, place.block, plan.slices, place)):
            _add_slices(block, plan, slices, place)


def _add_rows(
    block: CudaFfn, groups: NeuronGroups, plan: DownPlan, hidden: KernelTensor, slices: KernelTensor, place: ThreadIndex
) -> None:
    """slices[token · slices + slice, tile] = Σ hidden[place] · down[place] over the places of a slice."""
    rows, start = block.spec.rows, bind(place.block_y * plan.places)
    listed = min(blocks_for(plan.places, DOWN_THREADS) * DOWN_THREADS, _LISTED)
    part = _Slice(
        token=bind(place.block % rows),
        start=start,
        stop=bind(minimum(start + plan.places, plan.all_places)),
        rows=shared(listed, dtype="int32"),
        outputs=shared(listed),
        numbering=Numbering(DOWN_THREADS),
        hidden=hidden,
    )
    tile, bundle = bind(place.block // rows), block.bundle
    sums = zero_registers(bundle.unit_weights)
    squares = zero_registers(1) if plan.squares else None
    # Lanes past the last column read its unit again.
    unit = bind(minimum(tile * WARP + place.lane, bundle.units - 1))
    with loop(0, blocks_for(plan.places, listed)) as turn:
        first = bind(start + turn * listed)
        count = _list(block, groups, part, (first, listed // DOWN_THREADS), place=place, squares=squares)
        _add_listed(bundle, part, count, unit, sums, place.warp)
    row = bind(part.token * plan.slices + place.block_y)
    _add_warps(sums, lane_columns=bundle.unit_weights, slices=slices, row=row, tile=tile, place=place)
    if squares is not None:
        total = block_sum(squares[0], place.thread, DOWN_THREADS)
        # The blocks of all tiles have the same sum.
        with when(tirx.And(tile == 0, place.thread == 0)):
            slices[row, plan.tiles * plan.width] = total


def _list(
    block: CudaFfn, groups: NeuronGroups, part: _Slice, places: tuple[Expr, int],
    *, place: ThreadIndex, squares: KernelTensor | None,
) -> Expr:  # fmt: skip
    """List rows and outputs of the neurons that fired, in order, of `places`: the first one, and 256 how many times.

    Return how many there are. Where there are `squares`, this thread's register for them, its outputs' squares are
    added to it.
    """
    is_dense = not (block.spec.is_masked or block.spec.is_exact or block.spec.has_limits)
    listed, (start, turns) = zero_registers(1, "int32"), places
    for turn in range(turns):
        at = bind(start + turn * DOWN_THREADS + place.thread)
        inside = at < part.stop
        output = bind(tirx.if_then_else(inside, part.hidden[part.token, at], 0.0))
        if squares is not None:
            squares[0] = squares[0] + output * output
        neuron = groups.at_place(at)
        # Where all neurons are computed all are added: to leave out some here and there would break the one stream.
        flag = bind(tirx.And(inside, neuron < groups.neurons) if is_dense else output != 0.0)
        position, count = part.numbering.number(flag, place)
        with when(flag):
            index = bind(listed[0] + position)
            part.rows[index], part.outputs[index] = block.down_row(neuron), output
        listed[0] = listed[0] + count
    barrier()
    return bind(listed[0])


def _add_listed(bundle: CudaMatrix, part: _Slice, count: Expr, unit: Expr, sums: KernelTensor, warp: Expr) -> None:
    a_turn = _WARPS * _TOGETHER
    with loop(0, (count + (a_turn - 1)) // a_turn) as turn:
        units, factors = [], []
        for i in range(_TOGETHER):
            position = bind(turn * a_turn + i * _WARPS + warp)
            # Past the last row its own is read again, and added nothing of.
            known = bind(minimum(position, count - 1))
            units.append(bundle.unit(bind(part.rows[known]), unit))
            factors.append(bind(select(position < count, part.outputs[known], 0.0)))
        loads_first()
        for read, factor in zip(units, factors, strict=True):
            scaled = factor if read.scale is None else bind(factor * read.scale)
            for i, weight in enumerate(read.values):
                sums[i] = sums[i] + weight * scaled


def _add_warps(
    sums: KernelTensor, lane_columns: int, slices: KernelTensor, row: Expr, tile: Expr, place: ThreadIndex
) -> None:
    """Add the second half of the warps to the first, then these in order."""
    half, width = _WARPS // 2, lane_columns * WARP
    of_warps = shared(half, width)
    # TVM gives it the memory of the list, which others may still read.
    barrier()
    with when(place.warp >= half):
        for i in range(lane_columns):
            of_warps[place.warp - half, i * WARP + place.lane] = sums[i]
    barrier()
    with when(place.warp < half):
        for i in range(lane_columns):
            sums[i] = sums[i] + of_warps[place.warp, i * WARP + place.lane]
    # TVM sees a race where one condition both reads and writes.
    barrier()
    with when(place.warp < half):
        for i in range(lane_columns):
            of_warps[place.warp, i * WARP + place.lane] = sums[i]
    barrier()
    for first in range(0, width, DOWN_THREADS):
        column = bind(first + place.thread)
        total = of_warps[0, column]
        for warp in range(1, half):
            total = total + of_warps[warp, column]
        slices[row, tile * width + column] = total


def _add_slices(block: CudaFfn, plan: DownPlan, slices: KernelTensor, place: ThreadIndex) -> None:
    """y[token] = the sum of its slices in order, and the bias, in the columns of this block's tile."""
    token, tile = bind(place.block % block.spec.rows), bind(place.block // block.spec.rows)
    first_row, lane_columns = bind(token * plan.slices), plan.width // WARP
    total = registers(_LANES)

    def add(at: Expr, lanes: int) -> list[Expr]:
        """Return the sums of `lanes` neighbouring elements of a slice."""
        for i in range(lanes):
            total[i] = 0.0

        def add_several(first: Expr, count: int) -> None:
            rows = [bind(first_row + first + number) for number in range(count)]
            found = [load_lanes(slices, (row, at), lanes, _ALWAYS) for row in rows]
            loads_first()
            for of_slice in found:
                for i in range(lanes):
                    total[i] = total[i] + of_slice[i]

        full = plan.slices // _SLICES_TOGETHER
        with loop(0, full) as turn:
            add_several(turn * _SLICES_TOGETHER, _SLICES_TOGETHER)
        if plan.slices % _SLICES_TOGETHER:
            add_several(full * _SLICES_TOGETHER, plan.slices % _SLICES_TOGETHER)
        return [total[i] for i in range(lanes)]

    for first in range(0, plan.width, DOWN_THREADS * _LANES):
        start = bind(first + place.thread * _LANES)
        with when(start < plan.width):
            for i, value in enumerate(add(tile * plan.width + start, _LANES)):
                at = start + i
                column = bind(tile * plan.width + at % WARP * lane_columns + at // WARP)
                with when(column < block.spec.dim):
                    block.y[token, column] = value if block.down_bias is None else value + block.down_bias[column]
    if plan.squares:
        with when(tirx.And(tile == 0, place.thread == 0)):
            block.y[token, block.spec.dim] = add(plan.tiles * plan.width, 1)[0]


# Where there are many tokens, a block multiplies a tile of tokens and columns on tensor cores.


_CHUNK_SUM_THREADS = 256
# The blocks that keep a GPU busy, the neurons worth a slice, and the most slices that cost little beside the product.
_TILE_BLOCKS, _FEWEST_OF_SLICE, _MOST_SLICES = 256, 256, 8


@dataclass(frozen=True)
class DownTiles:
    """Tiles of `tokens` and of `columns`, each in `slices` of `neurons` neurons, or fewer where there are fewer."""

    tile: ProductTile
    tokens: int
    columns: int
    slices: int
    neurons: int

    @classmethod
    def of(cls, neurons: int, dim: int, rows: int) -> "DownTiles":
        """Return the tiles of a feed-forward block."""
        # Slices make blocks enough of large tiles.
        tile = LARGE if rows > SMALL.tokens else SMALL
        tokens, columns = blocks_for(rows, tile.tokens), blocks_for(dim, tile.outputs)
        wanted = min(blocks_for(_TILE_BLOCKS, tokens * columns), blocks_for(neurons, _FEWEST_OF_SLICE), _MOST_SLICES)
        each = blocks_for(blocks_for(neurons, wanted), STEP) * STEP
        return cls(tile, tokens, columns, blocks_for(neurons, each), each)

    def steps_of_slice(self, steps: Expr) -> Expr:
        """Return how many of `steps` steps of 32 neurons a slice has; the last slices may have fewer, or none."""
        if isinstance(steps, int):
            return self.neurons // STEP
        return bind(tirx.Max((steps + (self.slices - 1)) // self.slices, 1))


def multiply_down(function: CudaFunction, block: CudaFfn, hidden: KernelTensor) -> None:
    """Write the launches of y = hidden · down + bias for hidden float32 [rows, neurons], and declare their memory."""
    rows, neurons, dim = block.spec.rows, block.spec.neurons, block.spec.dim
    tiles = DownTiles.of(neurons, dim, rows)
    outputs = Halves.scratch(function, "outputs", rows, neurons)
    if block.count is not None:
        outputs = replace(outputs, count=block.neurons)
    slices = function.scratch("slices", "float32", tiles.slices * rows, dim) if tiles.slices > 1 else None
    outputs.write(function, hidden)
    grid, tile = (tiles.columns, tiles.tokens * tiles.slices), tiles.tile
    with function.launch(grid=grid, block=tile.threads, resident=tile.resident) as place:
        _multiply_tile(
            block, tiles, outputs, out=block.y if slices is None else slices, tokens=function.tokens(rows), place=place
        )
    if slices is not None:
        with (
            function.launch(grid=(blocks_for(dim, _CHUNK_SUM_THREADS), rows), block=_CHUNK_SUM_THREADS) as place,
            when(place.block_y < function.tokens(rows)),
        ):
            _add_tile_slices(block, tiles, slices, outputs, place)


def _multiply_tile(
    block: CudaFfn, tiles: DownTiles, outputs: Halves, out: KernelTensor, tokens: Expr, place: ThreadIndex
) -> None:
    """out[slice · rows + t] = Σ outputs[t, j] · down[j] over the neurons of a slice; with one slice y, and its bias."""
    rows, last, tile = block.spec.rows, block.neurons() - 1, tiles.tile
    number = bind(place.block_y // tiles.tokens)
    first_token = bind(place.block_y % tiles.tokens * tile.tokens)
    first_column = bind(place.block * tile.outputs)
    groups = outputs.groups()
    each = tiles.steps_of_slice(groups)
    begin = bind(number * each)
    stop = bind(minimum(begin + each, groups))
    bias = block.down_bias if tiles.slices == 1 else None
    is_there = first_token < tokens
    with when(is_there if block.count is None else tirx.And(is_there, begin < stop)):
        # Past the last neuron, where outputs are zero, its row is read again.
        weights = ColumnWeights(
            tile,
            matrix=block.bundle,
            row_of=lambda j: block.down_row(minimum(j, last)),
            first=first_column,
            place=place,
        )
        products = multiply(
            tile, x=outputs, span=(first_token, tokens), steps=(begin, stop), weights=weights, place=place
        )
        for token, column, total in products.each_result(first_column, block.spec.dim):
            out[number * rows + token, column] = total if bias is None else total + bias[column]


def _add_tile_slices(
    block: CudaFfn, tiles: DownTiles, slices: KernelTensor, outputs: Halves, place: ThreadIndex
) -> None:
    """y[token, column] = the sum of its slices, in order, and the bias."""
    rows, groups = block.spec.rows, outputs.groups()
    # Slices without neurons were not written.
    each = tiles.steps_of_slice(groups)
    used = None if block.count is None else bind((groups + (each - 1)) // each)
    token, column = place.block_y, bind(place.block * _CHUNK_SUM_THREADS + place.thread)
    with when(column < block.spec.dim):
        total = registers(1)
        total[0] = slices[token, column]
        for number in range(1, tiles.slices):
            with nullcontext() if used is None else when(number < used):
                total[0] = total[0] + slices[number * rows + token, column]
        block.y[token, column] = total[0] if block.down_bias is None else total[0] + block.down_bias[column]
