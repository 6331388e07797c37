"""Copies between the memory of a GPU and memory that it shares with the host.

What the host writes while a kernel runs is read by `pi_load_shared`. The compiler would read it with instructions for
memory that nobody changes, whose cache may hold what was there before the flag was set.
"""

from collections.abc import Callable

from tvm import tirx

from picompile_codegen.cpu.kernel import Access
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, when
from picompile_codegen.cpu.transfer import FLAG_SHAPE
from picompile_codegen.cpu.vector import at
from picompile_codegen.cuda.function import WARP, CudaFunction, CudaKernel, ThreadIndex, blocks_for
from picompile_codegen.cuda.matrix import lanes_for, load_lanes, store_lanes
from picompile_codegen.cuda.memory import address, barrier, registers, run_extern, shared, warp_sum

THREADS = 1024
# Reads of a thread that are under way together.
_READS = 4
# What a block receives.
BLOCK_ELEMENTS = THREADS * _READS


def load_shared(tensor: KernelTensor, *index: Expr) -> Expr:
    """An element of memory that the host may have written since the kernel began."""
    # Not `extern`: what that gives may be moved to where it is used, and this changes while the kernel runs.
    return tirx.call_extern(tensor.dtype, "pi_load_shared", address(tensor, *index))


def send_rows(x: KernelTensor, out: KernelTensor, tokens: Expr, dim: int, place: ThreadIndex) -> None:
    """out = x in the rows that count. One block, `_READS` reads of a thread at a time."""
    lanes = lanes_for(dim)
    units = dim // lanes

    def copy(items: list[tuple[Expr, Expr]]) -> None:
        indices = [(bind(item // units), bind(item % units) * lanes) for item, _ in items]
        read = [load_lanes(x, index, lanes, inside) for index, (_, inside) in zip(indices, items, strict=True)]
        for index, values, (_, inside) in zip(indices, read, items, strict=True):
            store_lanes(out, index, values, inside)

    _in_turns(tokens * units, place, copy)


def _in_turns(count: Expr, place: ThreadIndex, body: Callable[[list[tuple[Expr, Expr]]], None]) -> None:
    """Shares `count` items among the threads of one block: `body` gets `_READS` numbers, and whether each is one."""
    each = BLOCK_ELEMENTS
    with loop(0, (count + (each - 1)) // each) as turn:
        numbers = [bind(turn * each + i * THREADS + place.thread) for i in range(_READS)]
        body([(number, number < count) for number in numbers])


def send_bits(
    mask: KernelTensor, table: KernelTensor, out_mask: KernelTensor, tokens: Expr, columns: int, place: ThreadIndex
) -> Expr:
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


def _masked(mask: KernelTensor, table: KernelTensor, index: tuple[Expr, Expr], lanes: int, inside: Expr) -> list[Expr]:
    """The bits of `lanes` of the host's columns, zeros unless `inside`."""
    row, start = index
    zero = tirx.IntImm("uint8", 0)
    numbers = load_lanes(table, (start,), lanes, inside)
    return [bind(tirx.if_then_else(inside, mask[row, number], zero)) for number in numbers]


def _store_bytes(out: KernelTensor, row: Expr, start: Expr, values: list[Expr]) -> None:
    """Writes one byte, or four at a time: the bus carries few small writes."""
    if len(values) == 1:
        out[row, start] = values[0]
        return
    word = tirx.Cast("uint32", values[0])
    for i, value in enumerate(values[1:], 1):
        word = word | (tirx.Cast("uint32", value) << tirx.IntImm("uint32", 8 * i))
    out[row, at(start, len(values))] = tirx.reinterpret(f"uint8x{len(values)}", bind(word))


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


def receive_rows(
    source: KernelTensor, y: KernelTensor, tokens: Expr, columns: int, wanted: Expr, place: ThreadIndex
) -> None:
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


# Where a GPU meets the host: see `picompile_codegen.cpu.transfer`. Shared memory is the host's, mapped.
#
# What is sent is written by one block. A flag may be set only when all of it is there, and threads of one block can
# wait
# for each other; blocks could only count each other, in memory that begins at zero, which scratch memory does not.
# Nobody
# waits for writes, so one block should do (not measured). Reads wait for the bus, so what is received is read by as
# many
# blocks as it takes to have all of it under way at once. Each of them waits for the flag itself.


_COPY_THREADS = 256
_MOST_ROUNDS = 2**20
_ALWAYS = tirx.IntImm("bool", 1)


def send(*, dim: int, rows: int) -> CudaKernel:
    """out = x, then the flag is set. x float32 [rows, dim] → out [rows, dim], shared."""
    function = CudaFunction("send", dim, f"r{rows}")
    with function:
        x, out = function.floats("x", rows, dim), function.floats("out", rows, dim)
        flag = _flag(function, "flag", "sets")
        with function.launch(grid=1, block=THREADS) as place:
            send_rows(x, out, function.tokens(rows), dim, place)
            barrier()
            _signal(flag, function.step_number(), place)
    return function.cuda_kernel()


def send_mask(*, dim: int, neurons: int, columns: int, rows: int) -> CudaKernel:
    """out = x and out_mask[t, i] = mask[t, table[i]], then the flag is set; `count` is how many ones out_mask has.

    x float32 [rows, dim], mask uint8 [rows, neurons], table int32 [columns] → out like x and out_mask uint8 [rows,
    columns], both shared; count int32 [1].
    """
    function = CudaFunction("send_mask", f"{neurons}to{columns}x{dim}", f"r{rows}")
    with function:
        x, mask = function.floats("x", rows, dim), function.argument("mask", "uint8", rows, neurons, below=2)
        table = function.argument("table", "int32", columns, below=neurons)
        out, out_mask = function.floats("out", rows, dim), function.argument("out_mask", "uint8", rows, columns)
        count = function.argument("count", "int32", 1)
        flag = _flag(function, "flag", "sets")
        with function.launch(grid=1, block=THREADS) as place:
            tokens = function.tokens(rows)
            send_rows(x, out, tokens, dim, place)
            ones = send_bits(mask, table, out_mask, tokens, columns, place)
            add_up(ones, count, place)
            _signal(flag, function.step_number(), place)
    return function.cuda_kernel()


def receive(*, dim: int, rows: int, counted: bool) -> CudaKernel:
    """y = source, once the flag is set. source float32 [rows, dim], shared → y [rows, dim].

    With `counted`, count int32 [1] says how much the host had to do; for nothing y is 0, and nobody waits.
    """
    function = CudaFunction("receive", dim, f"r{rows}", "counted" if counted else "")
    with function:
        source = function.floats("source", rows, dim)
        flag, abandoned = _flag(function, "flag", "awaits"), _flag(function, "abandoned", "abandons")
        count = function.argument("count", "int32", 1) if counted else None
        y = function.floats("y", rows, dim)
        with function.launch(grid=blocks_for(rows * dim, BLOCK_ELEMENTS), block=THREADS) as place:
            wanted = _ALWAYS if count is None else bind(count[0] != 0)
            _wait(flag, abandoned, function.step_number(), wanted, place)
            receive_rows(source, y, function.tokens(rows), dim, wanted, place)
    return function.cuda_kernel()


def receive_mask(*, neurons: int, rows: int) -> CudaKernel:
    """y = source, once the flag is set. source uint8 [rows, neurons], shared → y [rows, neurons]."""
    function = CudaFunction("receive_mask", neurons, f"r{rows}")
    with function:
        source = function.argument("source", "uint8", rows, neurons, below=2)
        flag, abandoned = _flag(function, "flag", "awaits"), _flag(function, "abandoned", "abandons")
        y = function.argument("y", "uint8", rows, neurons)
        with function.launch(grid=blocks_for(rows * neurons, BLOCK_ELEMENTS), block=THREADS) as place:
            _wait(flag, abandoned, function.step_number(), _ALWAYS, place)
            receive_rows(source, y, function.tokens(rows), neurons, _ALWAYS, place)
    return function.cuda_kernel()


def copy_words(*, words: int) -> CudaKernel:
    """y = source, int32 [words]: what changes from step to step, from shared memory to the device's."""
    function = CudaFunction("copy_words", words)
    with function:
        source = function.argument("source", "int32", words)
        y = function.argument("y", "int32", words, copies="source")
        with function.launch(grid=blocks_for(words, _COPY_THREADS), block=_COPY_THREADS) as place:
            i = bind(place.block * _COPY_THREADS + place.thread)
            with when(i < words):
                y[i] = load_shared(source, i)
    return function.cuda_kernel()


def ping_pong() -> CudaKernel:
    """Answer the host step[0] times: what it measures a round trip with, and that both see what the other writes.

    ping, pong and abandoned are flags; sent int32 [1024] → echoed int32 [1024], 32 words a round; all are shared. It
    has no twin on the CPU: the other side is `pi_ping_pong` of native/host.c, which says more.
    """
    function = CudaFunction("ping_pong")
    with function:
        ping, pong = _flag(function, "ping", "awaits"), _flag(function, "pong", "sets")
        abandoned = _flag(function, "abandoned", "abandons")
        sent = function.argument("sent", "int32", 1024)
        echoed = function.argument("echoed", "int32", 1024, access="out")
        with function.launch(grid=1, block=WARP) as place:
            flags = [address(flag, 0) for flag in (ping, pong, abandoned)]
            words = [address(tensor, 0) for tensor in (sent, echoed)]
            run_extern("pi_ping_pong", *flags, *words, function.tokens(_MOST_ROUNDS), place.thread)
    return function.cuda_kernel()


def _flag(function: CudaFunction, name: str, access: Access) -> KernelTensor:
    return function.argument(name, "int32", *FLAG_SHAPE, access=access)


def _signal(flag: KernelTensor, step: Expr, place: ThreadIndex) -> None:
    """Sets the flag. All threads have come to a barrier since they wrote what it says is there."""
    with when(place.thread == 0):
        run_extern("pi_signal", address(flag, 0), step)


def _wait(flag: KernelTensor, abandoned: KernelTensor, step: Expr, wanted: Expr, place: ThreadIndex) -> None:
    """Returns, in all threads of the block, when the flag is set; at once if nothing is `wanted`."""
    with when(tirx.And(place.thread == 0, wanted)):
        run_extern("pi_wait", address(flag, 0), address(abandoned, 0), step)
    barrier()
