"""The emulation runs threads as CUDA does, and computes with halves, warps and matrices what a GPU computes.

A mistake here would let kernels pass that have the same one. What kernels do not use is not tested.
"""

import threading
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers.kernels.emulator import ORDERS, Emulated, EmulationError

EXECUTION = (Path(__file__).parent / "execution.cu").read_text()
MATRICES = (Path(__file__).parent / "matrices.cu").read_text()
LANES = np.arange(32)
Place = tuple[int, int]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated(EXECUTION + MATRICES, tmp_path_factory.mktemp("execution") / "execution.so")


@pytest.mark.slow("compiles a kernel once more; the switch of this machine is fast", but=("switch",))
@pytest.mark.parametrize("defines", [(), ("EMULATION_UCONTEXT",)], ids=["switch", "ucontext"])
def test_block_sum(tmp_path: Path, defines: tuple[str, ...]) -> None:
    """With the switch of fibers of this machine, and with the one that every machine has; from several threads."""
    kernels, rng = Emulated(EXECUTION, tmp_path / "execution.so", defines), np.random.default_rng(7)
    for threads in (1, 33, 200, 256):
        count = 5 * threads - threads // 2
        # Their sums are exact in float32, in whatever order.
        x = rng.integers(-99, 100, count).astype(np.float32)
        sums = np.full((len(ORDERS), 5), np.nan, np.float32)

        def launch(order: int, x: NDArray[np.float32] = x, sums: NDArray[np.float32] = sums, threads: int = threads):
            arrays = [x, np.array([len(x)], np.int32), sums[order]]
            kernels.launch("block_sum", (5, 1, 1), (threads, 1, 1), arrays, order)

        running = [threading.Thread(target=launch, args=(order,)) for order in ORDERS]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        padded = np.concatenate([x, np.zeros(5 * threads - count)])
        np.testing.assert_array_equal(sums, np.tile(padded.reshape(5, threads).sum(axis=1), (len(ORDERS), 1)))


def shuffled(operation: str, x: NDArray[np.int32], operand: int, width: int) -> NDArray[np.int32]:
    """By "Warp Shuffle Functions" in CUDA's guide: lanes outside of the segment leave the own value."""
    begin = LANES // width * width
    source = {
        "idx": begin + operand % width,
        "up": LANES - operand,
        "down": LANES + operand,
        "xor": LANES ^ operand,
    }[operation]
    outside = (source < begin) if operation == "up" else (source >= begin + width)
    return x[np.where(outside, LANES, source)]


@pytest.mark.parametrize("order", ORDERS)
def test_warps(kernels: Emulated, order: int) -> None:
    """Shuffles, ballots and votes."""
    x = np.random.default_rng(3).integers(-89, 100, 64).astype(np.int32)
    of_warps, out = (x[:32], x[32:]), np.full((8, 64), -(2**31), np.int32)
    for width, operand in ((1, 0), (2, 1), (8, 5), (16, 16), (32, 5), (32, 31)):
        kernels.launch("shuffles", (1, 1, 1), (64, 1, 1), [x, np.array([operand, width], np.int32), out], order)
        for row, operation in enumerate(["idx", "up", "down", "xor"] * 2):
            expected = [shuffled(operation, of_warp, operand, width) for of_warp in of_warps]
            np.testing.assert_array_equal(out[row], np.concatenate(expected), operation)
    votes = np.zeros((4, 64), np.uint32)
    kernels.launch("votes", (1, 1, 1), (64, 1, 1), [x, votes], order)
    for found, own in zip(np.hsplit(votes, 2), of_warps, strict=True):
        ballot = sum(1 << lane for lane in range(32) if own[lane] > 0)
        even = np.where(LANES % 2 == 0, ballot & 0x55555555, 0)
        expected = [np.full(32, value) for value in (ballot, (own > 90).any(), (own > -90).all())]
        np.testing.assert_array_equal(found, [*expected, even])


def turns(kernels: Emulated, order: int) -> list[int]:
    turn = np.full((3, 70), -1, np.int32)
    kernels.launch("turns", (3, 1, 1), (70, 1, 1), [np.zeros(1, np.int32), turn], order)
    return [int(thread) for thread in np.argsort(turn.reshape(-1))]


def test_the_order_of_threads_can_be_chosen(kernels: Emulated) -> None:
    everyone = list(range(210))
    assert turns(kernels, 0) == everyone
    assert turns(kernels, 1) == everyone[::-1]
    by_warp = [*range(64, 70), *range(32, 64), *range(32)]
    assert turns(kernels, 3) == [block * 70 + thread for block in (2, 1, 0) for thread in by_warp]
    at_random = [turns(kernels, order) for order in (2, 4, 5, 4)]
    assert all(sorted(order) == everyone for order in at_random)
    assert at_random[1] == at_random[3]
    assert len({tuple(order) for order in at_random}) == 3


def test_memory_that_nobody_wrote(kernels: Emulated) -> None:
    out = np.zeros((4, 2), np.float32)
    kernels.launch("unwritten", (4, 1, 1), (1, 1, 1), [np.array([3], np.int32), out])
    assert np.isnan(out[:, 0]).all()
    assert (out[:, 1] < -1e38).all()


def test_a_kernel_that_waits_without_end_is_ended(tmp_path: Path) -> None:
    kernels = Emulated(EXECUTION, tmp_path / "short.so", ["MOST_ASLEEP_S=0.1"])
    with pytest.raises(EmulationError, match=r"still calls __nanosleep after 0\.1 s"):
        kernels.launch("meet", (1, 1, 1), (70, 1, 1), [np.zeros(1, np.int32), np.zeros(70, np.int32)])


def test_halves_and_floats(kernels: Emulated) -> None:
    """Every half; and around each, halfway to the next one, and just above and below that. Any NaN is right."""
    halves, out = np.arange(1 << 16, dtype=np.uint16).view(np.float16), np.zeros(1 << 16, np.float32)
    kernels.launch("half_to_float", (1024, 1, 1), (64, 1, 1), [halves, out])
    np.testing.assert_array_equal(out, halves.astype(np.float32))
    assert np.signbit(out[0x8000])
    low = halves[:0x7C00].astype(np.float32)
    middle = low + np.diff(low, append=np.float32(65536)) / 2
    points = [low, middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(0))]
    x = np.concatenate([*points, *[-p for p in points], np.full(64, np.inf), np.full(64, np.nan)]).astype(np.float32)
    rounded = np.zeros(len(x), np.float16)
    kernels.launch("float_to_half", (len(x) // 64, 1, 1), (64, 1, 1), [x, rounded])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(rounded, x.astype(np.float16))
    np.testing.assert_array_equal(np.signbit(rounded[:-64]), np.signbit(x[:-64]))


# (row, column) -> (lane, element), by the formulas of the PTX ISA's "Matrix fragments for mma.m16n8k16": groupID is the
# lane / 4, threadID_in_group the lane % 4.
A16 = {(i, k): (4 * (i % 8) + k % 8 // 2, k % 2 + i // 8 * 2 + k // 8 * 4) for i in range(16) for k in range(16)}
A8 = D = {(i, k): place for (i, k), place in A16.items() if k < 8}
B16 = {(k, n): (4 * n + k % 8 // 2, k % 2 + k // 8 * 2) for k in range(16) for n in range(8)}
B8 = {(k, n): place for (k, n), place in B16.items() if k < 8}


def fragments(matrix: NDArray[np.generic], places: dict[Place, Place]) -> NDArray[np.uint32]:
    """[register, lane] of 32 bits: two halves in a register, or one float."""
    of_lanes = np.zeros((32, len(places) // 32), matrix.dtype)
    for (row, column), (lane, element) in places.items():
        of_lanes[lane, element] = matrix[row, column]
    return np.ascontiguousarray(of_lanes.view(np.uint32).T)


@pytest.mark.parametrize(("depth", "of_a", "of_b"), [(8, A8, B8), (16, A16, B16)], ids=["k8", "k16"])
def test_mma(kernels: Emulated, depth: int, of_a: dict[Place, Place], of_b: dict[Place, Place]) -> None:
    rng = np.random.default_rng(depth)
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((16, depth), (depth, 8)))
    # Subnormal halves, and the largest ones.
    a[3, :4], b[:2, 5] = [6e-8, -6e-5, 65504, -65504], [65504, 6e-8]
    d = rng.standard_normal((16, 8)).astype(np.float32)
    expected = (a.astype(np.float64) @ b.astype(np.float64) + d).astype(np.float32)
    for order in ORDERS:
        found = fragments(d, D)
        arrays = [fragments(a, of_a), fragments(b, of_b), found.view(np.float32)]
        kernels.launch(f"multiply_k{depth}", (1, 1, 1), (32, 1, 1), arrays, order)
        np.testing.assert_array_equal(found, fragments(expected, D))


def test_ldmatrix(kernels: Emulated) -> None:
    halves = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    for order in ORDERS:
        loaded = np.zeros((2, 4, 32), np.uint32)
        kernels.launch("load_matrices", (1, 1, 1), (32, 1, 1), [halves.view(np.uint32).reshape(-1), loaded], order)
        # Lane i has two neighbours of row i / 4.
        pairs = loaded.view(np.uint16).reshape(2, 4, 8, 8)
        np.testing.assert_array_equal(pairs, [halves, halves.transpose(0, 2, 1)])


def test_copies_arrive_with_zeros_behind_them(kernels: Emulated) -> None:
    x = np.random.default_rng(1).integers(1, 2**32, (64, 4), dtype=np.uint32)
    bytes_ = np.random.default_rng(2).choice([0, 4, 8, 16], 64).astype(np.int32)
    for order in (*ORDERS, 99):
        y = np.full_like(x, 7)
        kernels.launch("copy", (1, 1, 1), (64, 1, 1), [x, bytes_, y], order)
        np.testing.assert_array_equal(y, np.where(np.arange(4) * 4 < bytes_[:, None], x, 0))
