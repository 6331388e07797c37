"""Memory of a thread block and of a thread, and a block's joint operations: sums, maxima, counts of flags."""

from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from picompile_codegen.cpu.activations import Arithmetic, apply_activation, apply_expression
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, select, when
from picompile_codegen.cuda.function import WARP, ThreadIndex

_ALL_LANES = 0xFFFFFFFF


def shared(*shape: int, dtype: str = "float32") -> KernelTensor:
    """Return memory of a block. A block has 48 KiB at most."""
    return KernelTensor(T.alloc_buffer(shape, dtype, scope="shared"))


def registers(*shape: int, dtype: str = "float32") -> KernelTensor:
    """Return memory of a thread: registers, where all indices are known when the kernel is written (use Python
    loops)."""
    return KernelTensor(T.alloc_buffer(shape, dtype, scope="local"))


def zero_registers(count: int, dtype: str = "float32") -> KernelTensor:
    """Return `count` registers of a thread, all 0."""
    values = registers(count, dtype=dtype)
    for i in range(count):
        values[i] = tirx.const(0, dtype)
    return values


def barrier() -> None:
    """Wait for all threads of the block, every one of which must come here."""
    T.evaluate(T.tvm_storage_sync("shared"))


def loads_first() -> None:
    """Issue all loads written so far before anything is computed from them."""
    run_extern("pi_loads_first")


def extern(name: str, *arguments: Expr) -> Expr:
    """Return a float32 of a function of prelude.cuh without side effects."""
    return tirx.call_pure_extern("float32", name, *arguments)


def run_extern(name: str, *arguments: Expr) -> None:
    """Call a function of prelude.cuh for its effect."""
    T.evaluate(tirx.call_extern("void", name, *arguments))


def address(tensor: KernelTensor, *index: Expr) -> Expr:
    """Return the address of an element."""
    return tirx.address_of(tensor[index])


def place_in(memory: KernelTensor, index: Expr) -> Expr:
    """Return the address of an element of one-dimensional memory, for a function that uses those behind it as well.

    Of memory whose elements are known by `address` alone, TVM omits what lies behind the last of them.
    """
    return memory._buffer.access_ptr(0, offset=index)


def from_lane(value: Expr, offset: int) -> Expr:
    """Return the value of the lane whose number is this one's XOR `offset`. All lanes of the warp must call this."""
    return T.tvm_warp_shuffle_xor(tirx.const(_ALL_LANES, "uint32"), value, offset, WARP, WARP)


def warp_sum(value: Expr) -> Expr:
    """Return the sum over the lanes of a warp, the same bits in every lane. All of them must call this."""
    return lanes_sum(value, WARP)


def lanes_sum(value: Expr, lanes: int) -> Expr:
    """Return the sum over each `lanes` neighbouring lanes, a power of two, the same bits in each.

    All must call this.
    """
    return _over_lanes(value, lambda a, b: a + b, lanes)


def warp_max(value: Expr) -> Expr:
    """Return the largest value of the lanes of a warp, in every lane. All of them must call this."""
    return _over_lanes(value, tirx.Max, WARP)


def block_sum(value: Expr, thread: Expr, threads: int) -> Expr:
    """Return the sum over the threads of a block, the same bits in every thread. All of them must call this."""
    return _over_block(value, thread, threads, over_warp=warp_sum, neutral=0.0)


def block_max(value: Expr, thread: Expr, threads: int) -> Expr:
    """Return the largest value of the threads of a block, in every thread. All of them must call this."""
    return _over_block(value, thread, threads, over_warp=warp_max, neutral=-3.0e38)


def _over_lanes(value: Expr, combine: Any, lanes: int) -> Expr:
    offset = lanes // 2
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
    return over_warp(tirx.if_then_else(inside, sums[tirx.Select(inside, lane, 0)], neutral))


def last_block(tickets: KernelTensor, number: Expr, blocks: Expr, place: ThreadIndex) -> Expr:
    """Return, in all threads of the block, whether it is the last of `blocks` that share ticket `number` to come here.

    The last block sees all that the others have written before. All threads of each of these blocks must come.
    """
    found = shared(1, dtype="int32")
    # All of the block has written what it has to write.
    barrier()
    with when(place.thread == 0):
        found[0] = tirx.call_extern("int32", "pi_is_last", address(tickets, number), blocks)
    barrier()
    return bind(found[0] != 0)


class Numbering:
    """Numbers the threads of a block of `threads`, as often as it is asked to."""

    def __init__(self, threads: int) -> None:
        self._warps = threads // WARP
        self._words: KernelTensor = shared(self._warps, dtype="uint32")

    def number(self, flag: Expr, place: ThreadIndex) -> tuple[Expr, Expr]:
        """Return how many threads before this one have a `flag`, and how many have one.

        All of the block must call this.
        """
        # Not a pure call: TVM would repeat it where its value is used, and there not all lanes may come.
        bits = bind(tirx.call_extern("uint32", "pi_ballot", tirx.Cast("int32", flag)))
        # Whoever still reads the words of an earlier call must be done first.
        barrier()
        with when(place.lane == 0):
            self._words[place.warp] = bits
        barrier()
        below = (tirx.const(1, "uint32") << tirx.Cast("uint32", place.lane)) - tirx.const(1, "uint32")
        before, total = _ones(bits & below), tirx.IntImm("int32", 0)
        for warp in range(self._warps):
            count = bind(_ones(self._words[warp]))
            before = before + select(place.warp > warp, count, 0)
            total = total + count
        # TVM would write these sums out wherever they are used, if they were not stored.
        found = registers(2, dtype="int32")
        found[0], found[1] = before, total
        return bind(found[0]), bind(found[1])


def _ones(word: Expr) -> Expr:
    return tirx.Cast("int32", tirx.popcount(word))


def _sigmoid(x: Expr) -> Expr:
    # Where exp is infinite the quotient is 0, as it should be.
    return 1.0 / (1.0 + tirx.exp(-x))


def _softplus(x: Expr) -> Expr:
    # log(1 + e^x) = max(x, 0) + log(1 + e^-|x|), by two terms of its series where 1 + e^-|x| would lose digits.
    small = bind(tirx.exp(-tirx.abs(x)))
    rest = tirx.Select(small < 1e-3, small * (1.0 - 0.5 * small), tirx.log(1.0 + small))
    return tirx.max(x, tirx.FloatImm("float32", 0.0)) + rest


_ARITHMETIC = Arithmetic(float, sigmoid=_sigmoid, tanh=tirx.tanh, erf=tirx.erf, exp=tirx.exp, softplus=_softplus)


def activate(text: str, x: Expr) -> Expr:
    """Return the activation that `text` names, of a float32. Raises `ValueError` for one that is not known."""
    return apply_activation(text, x, _ARITHMETIC)


def compute(expression: str, inputs: list[Expr]) -> Expr:
    """Return the value of an expression of `elementwise`, of float32."""
    return apply_expression(expression, inputs, _ARITHMETIC)
