"""Where host and device meet: values are written to memory that both see, and flags say that they are there.

A flag is int32 [16], a cache line, of which the first element counts: it holds the number of the last step, step[3], in
which it was set. `abandoned` int32 [16] is not 0 once either side has given up; then nobody waits any more.

The device calls `send`, `send_mask`, `receive` and `receive_mask`, the host `wait` before it reads what was sent, and
`signal` when what it wrote may be received. These are the kernels of a device that is a partition of the CPU, and of
the host; `picompile_codegen.cuda.transfer` has those of a GPU. How to wait is in native/host.c.
"""

from typing import Literal

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from picompile_codegen.cpu.kernel import Kernel, KernelFunction
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, local, loop, when
from picompile_codegen.cpu.vector import blocks, load, splat, store

FLAG_SHAPE = (16,)


def send(*, dim: int, rows: int) -> Kernel:
    """out = x, then the flag is set. x float32 [rows, dim] → out [rows, dim], shared."""
    function = KernelFunction("send", dim, f"r{rows}")
    with function:
        x, out = function.floats("x", rows, dim), function.floats("out", rows, dim)
        flag = _flag(function, "sets")
        _copy_rows(x, out, function.tokens(rows), dim)
        _signal(flag, function.step_number(), out, out)
    return function.kernel()


def send_mask(*, dim: int, neurons: int, columns: int, rows: int) -> Kernel:
    """out = x and out_mask[t, i] = mask[t, table[i]], then the flag is set; `count` is how many ones out_mask has.

    x float32 [rows, dim], mask uint8 [rows, neurons], table int32 [columns] → out like x and out_mask uint8 [rows,
    columns], both shared; count int32 [1].
    """
    function = KernelFunction("send_mask", f"{neurons}to{columns}x{dim}", f"r{rows}")
    with function:
        x, mask = function.floats("x", rows, dim), function.argument("mask", "uint8", rows, neurons, below=2)
        table = function.argument("table", "int32", columns, below=neurons)
        out, out_mask = function.floats("out", rows, dim), function.argument("out_mask", "uint8", rows, columns)
        count = function.argument("count", "int32", 1)
        flag = _flag(function, "sets")
        tokens = function.tokens(rows)
        total = local(1, dtype="int32")
        total[0] = 0
        with loop(0, tokens) as t, loop(0, columns) as i:
            bit = bind(mask[t, table[i]])
            out_mask[t, i] = bit
            total[0] = total[0] + tirx.Cast("int32", bit)
        count[0] = total[0]
        _copy_rows(x, out, tokens, dim)
        _signal(flag, function.step_number(), out, out_mask)
    return function.kernel()


def receive(*, dim: int, rows: int, counted: bool) -> Kernel:
    """y = source, once the flag is set. source float32 [rows, dim], shared → y [rows, dim].

    With `counted`, count int32 [1] says how much the host had to do; for nothing y is 0, and nobody waits.
    """
    function = KernelFunction("receive", dim, f"r{rows}", "counted" if counted else "")
    with function:
        source = function.floats("source", rows, dim)
        flag, abandoned = _flag(function, "awaits"), _flag(function, "abandons")
        count = function.argument("count", "int32", 1) if counted else None
        y = function.floats("y", rows, dim)
        tokens = function.tokens(rows)
        if count is None:
            _wait(flag, abandoned, function.step_number(), source)
            _copy_rows(source, y, tokens, dim)
        else:
            with when(count[0] == 0), loop(0, tokens) as t:
                blocks(dim, lambda c, valid: store(y, t, c, value=splat(0.0), valid=valid))
            with when(count[0] != 0):
                _wait(flag, abandoned, function.step_number(), source)
                _copy_rows(source, y, tokens, dim)
    return function.kernel()


def receive_mask(*, neurons: int, rows: int) -> Kernel:
    """y = source, once the flag is set. source uint8 [rows, neurons], shared → y [rows, neurons]."""
    function = KernelFunction("receive_mask", neurons, f"r{rows}")
    with function:
        source = function.argument("source", "uint8", rows, neurons, below=2)
        flag, abandoned = _flag(function, "awaits"), _flag(function, "abandons")
        y = function.argument("y", "uint8", rows, neurons)
        _wait(flag, abandoned, function.step_number(), source)
        with loop(0, function.tokens(rows)) as t, loop(0, neurons) as i:
            y[t, i] = source[t, i]
    return function.kernel()


def copy_words(*, words: int) -> Kernel:
    """y = source, int32 [words]: what changes from step to step, from shared memory to the device's."""
    function = KernelFunction("copy_words", words)
    with function:
        source = function.argument("source", "int32", words)
        y = function.argument("y", "int32", words, copies="source")
        with loop(0, words) as i:
            y[i] = source[i]
    return function.kernel()


def wait() -> Kernel:
    """Returns when the flag is set: the host's turn."""
    function = KernelFunction("wait")
    with function:
        flag, abandoned = _flag(function, "awaits"), _flag(function, "abandons")
        _wait(flag, abandoned, function.step_number(), flag)
    return function.kernel()


def signal() -> Kernel:
    """Sets the flag: the device may go on."""
    function = KernelFunction("signal")
    with function:
        flag = _flag(function, "sets")
        _signal(flag, function.step_number(), flag, flag)
    return function.kernel()


def _flag(function: KernelFunction, access: Literal["sets", "awaits", "abandons"]) -> KernelTensor:
    """Declares a flag, or `abandoned`."""
    return function.argument("abandoned" if access == "abandons" else "flag", "int32", *FLAG_SHAPE, access=access)


def _copy_rows(source: KernelTensor, target: KernelTensor, tokens: Expr, dim: int) -> None:
    with loop(0, tokens) as t:
        blocks(dim, lambda c, valid: store(target, t, c, value=load(source, t, c, valid=valid), valid=valid))


def _signal(flag: KernelTensor, step: Expr, written: KernelTensor, also_written: KernelTensor) -> None:
    T.evaluate(tirx.call_extern("void", "pi_signal", _start(flag), step, _start(written), _start(also_written)))


def _wait(flag: KernelTensor, abandoned: KernelTensor, step: Expr, awaited: KernelTensor) -> None:
    T.evaluate(tirx.call_extern("void", "pi_wait", _start(flag), _start(abandoned), step, _start(awaited)))


def _start(tensor: KernelTensor) -> Expr:
    return tirx.address_of(tensor.first)
