"""Transfers between host and GPU, through memory of the host that is mapped for the GPU.

`pi_load_shared` reads data that the host writes while a kernel runs. The compiler would use instructions for constant
memory, whose cache may hold data from before the flag was set.

One block writes all data to send. A flag may be set only when all are there, and threads of one block can wait
for each other; several blocks could only count each other, in memory that begins at zero, and scratch memory does not.
Writes wait for nothing, so one block should be enough (not measured). Reads wait for the bus, so as many blocks receive
data as it takes to have all reads under way at once. Each of them waits for the flag itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.backend import body
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, when
from picompile_codegen.cpu.vector import at
from picompile_codegen.cuda.function import WARP, CudaFunction, ThreadIndex, blocks_for
from picompile_codegen.cuda.matrix import lanes_for, load_lanes, store_lanes
from picompile_codegen.cuda.memory import address, barrier, run_extern, shared, warp_sum, zero_registers
from picompile_codegen.specs import (
    BorrowCacheSpec,
    CopyWordsSpec,
    CountedSendMaskSpec,
    PingPongSpec,
    ReceiveMaskSpec,
    ReceiveSpec,
    SendMaskSpec,
    SendSpec,
    UploadSpec,
)
from picompile_codegen.specs.arguments import ITEM_BYTES

THREADS = 1024
# Bytes that are stored at once.
WORD_BYTES = 4
# Reads of a thread that are under way together.
_READS = 4
# The elements that a block receives.
BLOCK_ELEMENTS = THREADS * _READS


def load_shared(tensor: KernelTensor, *index: Expr) -> Expr:
    """Load an element that the host may have written since the kernel began."""
    # Not `extern`: what that gives may be moved to where it is used, and this changes while the kernel runs.
    return tirx.call_extern(tensor.dtype, "pi_load_shared", address(tensor, *index))


def send_rows(function: CudaFunction, tokens: Expr, place: ThreadIndex) -> None:
    """out = x in the rows that count. One block, `_READS` reads of a thread at a time."""
    x, out = function["x"], function["out"]
    lanes = lanes_for(x.columns)
    units = x.columns // lanes

    def copy(items: list[tuple[Expr, Expr]]) -> None:
        indices = [(bind(item // units), bind(item % units) * lanes) for item, _ in items]
        read = [load_lanes(x, index, lanes, inside) for index, (_, inside) in zip(indices, items, strict=True)]
        for index, values, (_, inside) in zip(indices, read, items, strict=True):
            store_lanes(out, index, values, inside)

    _in_turns(tokens * units, place, copy)


def _in_turns(count: Expr, place: ThreadIndex, body: Callable[[list[tuple[Expr, Expr]]], None]) -> None:
    """Share `count` items among the threads of one block; `body` gets `_READS` (number, whether it is below
    `count`)."""
    each = BLOCK_ELEMENTS
    with loop(0, (count + (each - 1)) // each) as turn:
        numbers = [bind(turn * each + i * THREADS + place.thread) for i in range(_READS)]
        body([(number, number < count) for number in numbers])


@dataclass(frozen=True)
class MaskSizes:
    """The mask to send: rows, columns, and how many columns a thread takes at once, of which those are a multiple.

    Where `columns` are known only when the kernel runs, rows lie in one dimension.
    """

    rows: int
    columns: Expr
    lanes: int

    @classmethod
    def of(cls, spec: SendMaskSpec, function: CudaFunction) -> "MaskSizes":
        """Return the sizes in a launch of `spec`."""
        if isinstance(spec, CountedSendMaskSpec):
            return cls(spec.rows, bind(function["columns"][0]), WORD_BYTES if spec.in_words else 1)
        return cls(spec.rows, spec.columns, lanes_for(spec.columns))

    def row(self, item: Expr, units: Expr) -> Expr:
        """Return the row of item `item`, where a row has `units`."""
        return 0 if self.rows == 1 else bind(item // units)

    def unit(self, item: Expr, units: Expr) -> Expr:
        """Return the item's number in its row."""
        return item if self.rows == 1 else bind(item % units)

    def place(self, row: Expr, start: Expr) -> tuple[Expr, ...]:
        """Return the index of a column in the mask that is sent."""
        return (row, start) if isinstance(self.columns, int) else (row * self.columns + start,)


def send_bits(function: CudaFunction, tokens: Expr, sizes: MaskSizes, place: ThreadIndex) -> Expr:
    """out_mask[t, i] = mask[t, table[i]] in the rows that count; gives how many ones this thread has written."""
    mask, table, out_mask = function["mask"], function["table"], function["out_mask"]
    lanes, units = sizes.lanes, bind(sizes.columns // sizes.lanes)
    ones = zero_registers(1, "int32")

    def copy(items: list[tuple[Expr, Expr]]) -> None:
        indices = [(sizes.row(item, units), sizes.unit(item, units) * lanes) for item, _ in items]
        read = [_masked(mask, table, index, lanes, inside) for index, (_, inside) in zip(indices, items, strict=True)]
        for (row, start), bits, (_, inside) in zip(indices, read, items, strict=True):
            for bit in bits:
                ones[0] = ones[0] + tirx.Cast("int32", bit)
            with when(inside):
                _store_bytes(out_mask, sizes.place(row, start), bits)

    _in_turns(tokens * units, place, copy)
    return ones[0]


def _masked(mask: KernelTensor, table: KernelTensor, index: tuple[Expr, Expr], lanes: int, inside: Expr) -> list[Expr]:
    """Return the bits of `lanes` of the host's columns, zeros unless `inside`."""
    row, start = index
    zero = tirx.IntImm("uint8", 0)
    numbers = load_lanes(table, (start,), lanes, inside)
    return [bind(tirx.if_then_else(inside, mask[row, number], zero)) for number in numbers]


def _store_bytes(out: KernelTensor, index: tuple[Expr, ...], values: list[Expr]) -> None:
    """Write one byte, or four at a time: the bus carries few small writes."""
    *row, start = index
    if len(values) == 1:
        out[index] = values[0]
        return
    word = tirx.Cast("uint32", values[0])
    for i, value in enumerate(values[1:], 1):
        word = word | (tirx.Cast("uint32", value) << tirx.IntImm("uint32", 8 * i))
    out[(*row, at(start, len(values)))] = tirx.reinterpret(f"uint8x{len(values)}", bind(word))


def add_up(value: Expr, total: KernelTensor, place: ThreadIndex) -> None:
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


_COPY_THREADS = 256
_MOST_ROUNDS = 2**20
_ALWAYS = tirx.IntImm("bool", 1)


@body(SendSpec)
def send(spec: SendSpec, function: CudaFunction) -> None:
    """Write the launch of a `SendSpec`."""
    with function.launch(grid=1, block=THREADS) as place:
        send_rows(function, function.tokens(spec.rows), place)
        barrier()
        _signal(function["flag"], function.step_number(), place)


@body(CountedSendMaskSpec, SendMaskSpec)
def send_mask(spec: SendMaskSpec, function: CudaFunction) -> None:
    """Write the launch of a `SendMaskSpec`."""
    with function.launch(grid=1, block=THREADS) as place:
        tokens = function.tokens(spec.rows)
        send_rows(function, tokens, place)
        ones = send_bits(function, tokens, MaskSizes.of(spec, function), place)
        add_up(ones, function["count"], place)
        _signal(function["flag"], function.step_number(), place)


@body(ReceiveMaskSpec, ReceiveSpec)
def receive(spec: ReceiveMaskSpec | ReceiveSpec, function: CudaFunction) -> None:
    """Write the launch of a `ReceiveSpec` or a `ReceiveMaskSpec`: a thread has `_READS` elements."""
    source, y = function["source"], function["y"]
    columns = y.columns
    with function.launch(grid=blocks_for(spec.rows * columns, BLOCK_ELEMENTS), block=THREADS) as place:
        wanted, tokens = wait_for_host(function, place), function.tokens(spec.rows)
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


@body(BorrowCacheSpec)
def borrow_cache(spec: BorrowCacheSpec, function: CudaFunction) -> None:
    """Write the launch of a `BorrowCacheSpec`: a thread copies `_READS` words of a head, or as many elements where a
    head has no whole number of words.

    Blocks that have nothing to copy end at once. Only the first waits even then: what the host does before it sets the
    flag is over when the launch is (see `lowering/shared_memory.py`).
    """
    source, y, elements = function["source"], function["y"], spec.context * spec.width
    each = max(1, WORD_BYTES // ITEM_BYTES[spec.dtype])
    each = each if elements % each == 0 else 1
    grid = (blocks_for(elements // each, BLOCK_ELEMENTS), spec.kv_heads)
    with function.launch(grid=grid, block=THREADS) as place:
        head, first = place.block_y, bind(place.block * BLOCK_ELEMENTS + place.thread)
        count = bind((function.position(spec.context) * spec.width + (each - 1)) // each)
        has_work = place.block * BLOCK_ELEMENTS < count
        with when(tirx.Or(has_work, tirx.And(place.block == 0, head == 0))):
            wait_for_host(function, place)
            numbers = [bind(first + i * THREADS) for i in range(_READS)]
            insides = [bind(number < count) for number in numbers]
            words = [
                bind(tirx.if_then_else(inside, _load_word(source, head, number, each), tirx.const(0, "int32")))
                for number, inside in zip(numbers, insides, strict=True)
            ]
            for number, inside, word in zip(numbers, insides, words, strict=True):
                with when(inside):
                    run_extern(f"pi_store_{_word(spec.dtype, each)}", address(y, head, number * each), word)


def _load_word(source: KernelTensor, head: Expr, number: Expr, each: int) -> Expr:
    """Return the bits of `each` elements that the host has written since the kernel began."""
    name = f"pi_load_shared_{_word(source.dtype, each)}"
    return tirx.call_extern("int32", name, address(source, head, number * each))


def _word(dtype: str, each: int) -> str:
    """Return what prelude.cuh calls as many bytes as `each` elements have."""
    return {1: "byte", 2: "half", 4: "word"}[ITEM_BYTES[dtype] * each]


@body(CopyWordsSpec)
def copy_words(spec: CopyWordsSpec, function: CudaFunction) -> None:
    """Write the launch of a `CopyWordsSpec`."""
    source, y = function["source"], function["y"]
    with function.launch(grid=blocks_for(spec.words, _COPY_THREADS), block=_COPY_THREADS) as place:
        i = bind(place.block * _COPY_THREADS + place.thread)
        with when(i < spec.words):
            y[i] = load_shared(source, i)


@body(UploadSpec)
def upload(_: UploadSpec, function: CudaFunction) -> None:
    """Write the copy of an `UploadSpec`."""
    function.copy("source", "y")


@body(PingPongSpec)
def ping_pong(_: PingPongSpec, function: CudaFunction) -> None:
    """Write the launch of a `PingPongSpec`."""
    names = ("ping", "pong", "abandoned", "sent", "echoed")
    with function.launch(grid=1, block=WARP) as place:
        tensors = [address(function[name], 0) for name in names]
        run_extern("pi_ping_pong", *tensors, function.tokens(_MOST_ROUNDS), place.thread)


def _signal(flag: KernelTensor, step: Expr, place: ThreadIndex) -> None:
    """Set the flag. All threads must have passed a barrier since they wrote the values that it announces."""
    with when(place.thread == 0):
        run_extern("pi_signal", address(flag, 0), step)


def wait_for_host(function: CudaFunction, place: ThreadIndex) -> Expr:
    """Wait, in all threads of the block, until the kernel's flag is set; return whether there are values to read.

    Where the kernel has a `count` and that is 0 there are none, and nobody waits.
    """
    count = function.get("count")
    wanted = _ALWAYS if count is None else bind(count[0] != 0)
    step = function.step_number()
    with when(tirx.And(place.thread == 0, wanted)):
        run_extern("pi_wait", address(function["flag"], 0), address(function["abandoned"], 0), step)
    barrier()
    return wanted
