"""Where a GPU meets the host: see `picompile_codegen.kernels.exchange`. Shared memory is the host's, mapped.

What is sent is written by one block. A flag may be set only when all of it is there, and threads of one block can wait
for each other; blocks could only count each other, in memory that begins at zero, which scratch memory does not. Nobody
waits for writes, so one block should do (not measured). Reads wait for the bus, so what is received is read by as many
blocks as it takes to have all of it under way at once. Each of them waits for the flag itself.
"""

from tvm import tirx

from picompile_codegen.cuda.exchange_copies import (
    BLOCK_ELEMENTS,
    THREADS,
    add_up,
    load_shared,
    receive_rows,
    send_bits,
    send_rows,
)
from picompile_codegen.cuda.function import WARP, CudaFunction, CudaKernel, Place, blocks_for
from picompile_codegen.cuda.memory import address, barrier, run_extern
from picompile_codegen.kernels.exchange import FLAG_SHAPE
from picompile_codegen.kernels.kernel import Access
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, when

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


def _flag(function: CudaFunction, name: str, access: Access) -> Tensor:
    return function.argument(name, "int32", *FLAG_SHAPE, access=access)


def _signal(flag: Tensor, step: Expr, place: Place) -> None:
    """Sets the flag. All threads have come to a barrier since they wrote what it says is there."""
    with when(place.thread == 0):
        run_extern("pi_signal", address(flag, 0), step)


def _wait(flag: Tensor, abandoned: Tensor, step: Expr, wanted: Expr, place: Place) -> None:
    """Returns, in all threads of the block, when the flag is set; at once if nothing is `wanted`."""
    with when(tirx.And(place.thread == 0, wanted)):
        run_extern("pi_wait", address(flag, 0), address(abandoned, 0), step)
    barrier()
