"""Rotary position embedding on a GPU: a thread turns a pair of elements."""

from tvm import tirx

from picompile_codegen.cuda.function import CudaFunction, CudaKernel, blocks_for
from picompile_codegen.cuda.step_rows import step_rows
from picompile_codegen.kernels.rotary import angles_argument
from picompile_codegen.kernels.step_rows import Mode, mode_name
from picompile_codegen.kernels.tensor import bind, when

# Few, so that even one token is shared by several multiprocessors.
_THREADS = 128


def rotary(*, heads: int, head_dim: int, rows: int, context: int, mode: Mode) -> CudaKernel:
    """Turns each head's (x[i], x[i + d/2]) by the angle of its position, whose cosine and sine are in tables.

    x float32 [rows, heads · d], cos and sin float32 [context, d/2] → y like x. Positions: see `step_rows`.
    """
    half = head_dim // 2
    function = CudaFunction("rotary", f"{heads}x{head_dim}", mode_name(mode, rows), f"c{context}")
    with function:
        x = function.floats("x", rows, heads * head_dim)
        angles = angles_argument(function, context, half)
        y = function.floats("y", rows, heads * head_dim)
        read_step = step_rows(function, mode, rows, context, sequences=1)
        with function.launch(grid=(blocks_for(heads * half, _THREADS), rows), block=_THREADS) as place:
            tokens, row = read_step(), place.block_y
            pair = bind(place.block * _THREADS + place.thread)
            with when(tirx.And(row < tokens.count, pair < heads * half)):
                head, i = bind(pair // half), bind(pair % half)
                first = bind(head * head_dim + i)
                position = bind(tokens.position(row))
                a, b = bind(x[row, first]), bind(x[row, first + half])
                cosine, sine = bind(angles.cos[position, i]), bind(angles.sin[position, i])
                y[row, first] = a * cosine - b * sine
                y[row, first + half] = b * cosine + a * sine
    return function.cuda_kernel()
