"""Memory of a block and of a thread, and what its threads do together."""

from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from picompile_codegen.cuda.function import WARP
from picompile_codegen.kernels.tensor import Expr, Tensor, bind

_ALL_LANES = 0xFFFFFFFF


def shared(*shape: int, dtype: str = "float32") -> Tensor:
    """Memory of a block. A block has 48 KiB at most."""
    return Tensor(T.alloc_buffer(shape, dtype, scope="shared"))


def registers(*shape: int, dtype: str = "float32") -> Tensor:
    """Memory of a thread: registers, where all indices are known when the kernel is written (use Python loops)."""
    return Tensor(T.alloc_buffer(shape, dtype, scope="local"))


def barrier() -> None:
    """Waits for all threads of the block. Every one of them must come here."""
    T.evaluate(T.tvm_storage_sync("shared"))


def loads_first() -> None:
    """Has all loads that were written so far under way before anything is computed from them."""
    run_extern("pi_loads_first")


def extern(dtype: str, name: str, *arguments: Expr) -> Expr:
    """A value from a function of prelude.cuh that changes nothing."""
    return tirx.call_pure_extern(dtype, name, *arguments)


def run_extern(name: str, *arguments: Expr) -> None:
    """Calls a function of prelude.cuh for what it does."""
    T.evaluate(tirx.call_extern("void", name, *arguments))


def address(tensor: Tensor, *index: Expr) -> Expr:
    """Where an element is."""
    return tirx.address_of(tensor[index])


def from_lane(value: Expr, offset: int) -> Expr:
    """The value that the lane with the number of this one XOR `offset` has. All lanes of the warp must ask."""
    return T.tvm_warp_shuffle_xor(tirx.const(_ALL_LANES, "uint32"), value, offset, WARP, WARP)


def warp_sum(value: Expr) -> Expr:
    """The sum over the lanes of a warp, the same bits in every lane. All of them must ask."""
    return _over_lanes(value, lambda a, b: a + b)


def warp_max(value: Expr) -> Expr:
    """The largest value of the lanes of a warp, in every lane. All of them must ask."""
    return _over_lanes(value, tirx.Max)


def block_sum(value: Expr, thread: Expr, threads: int) -> Expr:
    """The sum over the threads of a block, the same bits in every thread. All of them must ask."""
    return _over_block(value, thread, threads, warp_sum, 0.0)


def block_max(value: Expr, thread: Expr, threads: int) -> Expr:
    """The largest value of the threads of a block, in every thread. All of them must ask."""
    return _over_block(value, thread, threads, warp_max, -3.0e38)


def _over_lanes(value: Expr, combine: Any) -> Expr:
    offset = WARP // 2
    while offset:
        value = bind(value)
        value = combine(value, from_lane(value, offset))
        offset //= 2
    return bind(value)


def _over_block(value: Expr, thread: Expr, threads: int, over_warp: Any, neutral: float) -> Expr:
    of_warp = over_warp(value)
    if threads == WARP:
        return of_warp
    sums = shared(WARP)
    # Whoever still reads the sums of an earlier call must be done first.
    barrier()
    with T.If(thread % WARP == 0), T.Then():
        sums[thread // WARP] = of_warp
    barrier()
    lane = thread % WARP
    inside = lane < threads // WARP
    return over_warp(tirx.if_then_else(inside, sums[tirx.Select(inside, lane, 0)], tirx.FloatImm("float32", neutral)))
