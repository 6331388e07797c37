"""Copies between the memory of a GPU and memory that it shares with the host.

What the host writes while a kernel runs is read by `pi_load_shared`. The compiler would read it with instructions for
memory that nobody changes, whose cache may hold what was there before the flag was set.
"""

from collections.abc import Callable

from tvm import tirx

from picompile_codegen.cuda.function import WARP, Place
from picompile_codegen.cuda.memory import address, barrier, registers, shared, warp_sum
from picompile_codegen.cuda.rows import lanes_for, load_lanes, store_lanes
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, loop, when
from picompile_codegen.kernels.vector import at

THREADS = 1024
# Reads of a thread that are under way together.
_READS = 4
# What a block receives.
BLOCK_ELEMENTS = THREADS * _READS


def load_shared(tensor: Tensor, *index: Expr) -> Expr:
    """An element of memory that the host may have written since the kernel began."""
    # Not `extern`: what that gives may be moved to where it is used, and this changes while the kernel runs.
    return tirx.call_extern(tensor.dtype, "pi_load_shared", address(tensor, *index))


def send_rows(x: Tensor, out: Tensor, tokens: Expr, dim: int, place: Place) -> None:
    """out = x in the rows that count. One block, `_READS` reads of a thread at a time."""
    lanes = lanes_for(dim)
    units = dim // lanes

    def copy(items: list[tuple[Expr, Expr]]) -> None:
        indices = [(bind(item // units), bind(item % units) * lanes) for item, _ in items]
        read = [load_lanes(x, index, lanes, inside) for index, (_, inside) in zip(indices, items, strict=True)]
        for index, values, (_, inside) in zip(indices, read, items, strict=True):
            store_lanes(out, index, values, inside)

    _in_turns(tokens * units, place, copy)


def _in_turns(count: Expr, place: Place, body: Callable[[list[tuple[Expr, Expr]]], None]) -> None:
    """Shares `count` items among the threads of one block: `body` gets `_READS` numbers, and whether each is one."""
    each = BLOCK_ELEMENTS
    with loop(0, (count + (each - 1)) // each) as turn:
        numbers = [bind(turn * each + i * THREADS + place.thread) for i in range(_READS)]
        body([(number, number < count) for number in numbers])


def send_bits(mask: Tensor, table: Tensor, out_mask: Tensor, tokens: Expr, columns: int, place: Place) -> Expr:
    """out_mask[t, i] = mask[t, table[i]] in the rows that count; gives how many ones this thread has written."""
    lanes = lanes_for(columns)
    units = columns // lanes
    ones = registers(1, dtype="int32")
    ones[0] = 0

    def copy(items: list[tuple[Expr, Expr]]) -> None:
        indices = [(bind(item // units), bind(item % units) * lanes) for item, _ in items]
        read = [_masked(mask, table, index, lanes, inside) for index, (_, inside) in zip(indices, items, strict=True)]
        for (row, start), bits, (_, inside) in zip(indices, read, items, strict=True):
            for bit in bits:
                ones[0] = ones[0] + tirx.Cast("int32", bit)
            with when(inside):
                _store_bytes(out_mask, row, start, bits)

    _in_turns(tokens * units, place, copy)
    return ones[0]


def _masked(mask: Tensor, table: Tensor, index: tuple[Expr, Expr], lanes: int, inside: Expr) -> list[Expr]:
    """The bits of `lanes` of the host's columns, zeros unless `inside`."""
    row, start = index
    zero = tirx.IntImm("uint8", 0)
    numbers = load_lanes(table, (start,), lanes, inside)
    return [bind(tirx.if_then_else(inside, mask[row, number], zero)) for number in numbers]


def _store_bytes(out: Tensor, row: Expr, start: Expr, values: list[Expr]) -> None:
    """Writes one byte, or four at a time: the bus carries few small writes."""
    if len(values) == 1:
        out[row, start] = values[0]
        return
    word = tirx.Cast("uint32", values[0])
    for i, value in enumerate(values[1:], 1):
        word = word | (tirx.Cast("uint32", value) << tirx.IntImm("uint32", 8 * i))
    out[row, at(start, len(values))] = tirx.reinterpret(f"uint8x{len(values)}", bind(word))


def add_up(value: Expr, total: Tensor, place: Place) -> None:
    """total[0] = the sum of an int32 over the block, which its first thread writes. All threads come, to a barrier."""
    sums = shared(WARP, dtype="int32")
    of_warp = warp_sum(value)
    with when(place.lane == 0):
        sums[place.warp] = of_warp
    barrier()
    with when(place.warp == 0):
        of_block = warp_sum(sums[place.lane])
        with when(place.thread == 0):
            total[0] = of_block


def receive_rows(source: Tensor, y: Tensor, tokens: Expr, columns: int, wanted: Expr, place: Place) -> None:
    """y = source in the rows that count, or 0 unless it is `wanted`: `_READS` elements a thread."""
    zero = tirx.const(0, source.dtype)
    first = bind(place.block * BLOCK_ELEMENTS + place.thread)
    numbers = [bind(first + i * THREADS) for i in range(_READS)]
    indices = [(number // columns, number % columns) for number in numbers]
    insides = [bind(number < tokens * columns) for number in numbers]
    values = [
        bind(tirx.if_then_else(tirx.And(inside, wanted), load_shared(source, *index), zero))
        for index, inside in zip(indices, insides, strict=True)
    ]
    for index, inside, value in zip(indices, insides, values, strict=True):
        with when(inside):
            y[index] = value
