"""The emulation runs threads as CUDA does: indices, shared memory, barriers, warps, atomics, fences."""

import threading
from pathlib import Path

import numpy as np
import pytest

from helpers.kernels.emulator import ORDERS, Emulated, EmulationError

SOURCE = Path(__file__).parent / "execution.cu"
LANES = np.arange(32)


@pytest.fixture(scope="module", params=["switch", "ucontext"])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    """Compiled with the switch of this machine, and with the one that every machine has."""
    defines = ["EMULATION_UCONTEXT"] if request.param == "ucontext" else []
    return Emulated(SOURCE.read_text(), tmp_path_factory.mktemp("execution") / "execution.so", defines)


def whole_numbers(rng: np.random.Generator, count: int) -> np.ndarray:
    """Their sums are exact in float32, in whatever order."""
    return rng.integers(-99, 100, count).astype(np.float32)


@pytest.mark.parametrize("order", [*ORDERS, 99])
@pytest.mark.parametrize("threads", [1, 33, 200, 256])
def test_block_sum(kernels: Emulated, order: int, threads: int) -> None:
    blocks, rng = 5, np.random.default_rng(threads)
    count = blocks * threads - threads // 2
    x, sums = whole_numbers(rng, count), np.full(blocks, np.nan, np.float32)
    kernels.launch("block_sum", (blocks, 1, 1), (threads, 1, 1), [x, np.array([count], np.int32), sums], order)
    padded = np.zeros(blocks * threads)
    padded[:count] = x
    np.testing.assert_array_equal(sums, padded.reshape(blocks, threads).sum(axis=1))


@pytest.mark.parametrize("order", ORDERS)
def test_indices_of_blocks_and_threads(kernels: Emulated, order: int) -> None:
    grid, block = (3, 2, 2), (5, 3, 2)
    out = np.full((12, 30, 12), 0xABABABAB, np.uint32)
    kernels.launch("indices", grid, block, [out], order)
    expected = [
        (x, y, z, i, j, k, *block, *grid)
        for k in range(2)
        for j in range(2)
        for i in range(3)
        for z in range(2)
        for y in range(3)
        for x in range(5)
    ]
    np.testing.assert_array_equal(out.reshape(-1, 12), expected)


def shuffled(operation: str, x: np.ndarray, operand: int, width: int) -> np.ndarray:
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


@pytest.mark.parametrize("width", [1, 2, 8, 16, 32])
@pytest.mark.parametrize("operand", [0, 1, 5, 16, 31])
def test_shuffles(kernels: Emulated, operand: int, width: int) -> None:
    x = np.random.default_rng(operand).integers(-999, 999, 64).astype(np.int32)
    out = np.full((8, 64), -(2**31), np.int32)
    for order in ORDERS:
        kernels.launch("shuffles", (1, 1, 1), (64, 1, 1), [x, np.array([operand, width], np.int32), out], order)
        for row, operation in enumerate(["idx", "up", "down", "xor"] * 2):
            expected = [shuffled(operation, x[warp * 32 : warp * 32 + 32], operand, width) for warp in range(2)]
            np.testing.assert_array_equal(out[row], np.concatenate(expected), operation)


def test_shuffles_of_a_warp_that_is_not_full(kernels: Emulated) -> None:
    x, out = np.arange(48, dtype=np.int32), np.full((8, 48), -1, np.int32)
    kernels.launch("shuffles", (1, 1, 1), (48, 1, 1), [x, np.array([3, 16], np.int32), out])
    np.testing.assert_array_equal(out[0], LANES[3] + np.arange(48) // 16 * 16)
    np.testing.assert_array_equal(out[3], np.arange(48) ^ 3)


@pytest.mark.parametrize("order", ORDERS)
def test_ballots_and_votes_of_a_warp(kernels: Emulated, order: int) -> None:
    x = np.random.default_rng(3).integers(-89, 100, 64).astype(np.int32)
    out = np.full((16, 64), 0xABABABAB, np.uint32)
    kernels.launch("votes", (1, 1, 1), (64, 1, 1), [x, out], order)
    for warp in range(2):
        own = x[warp * 32 : warp * 32 + 32]
        words, ballot = own.view(np.uint32), sum(1 << lane for lane in range(32) if own[lane] > 0)
        numbers = [own.sum(), own.min(), own.max()]
        reduced = [f.reduce(words) for f in (np.minimum, np.maximum, np.bitwise_and, np.bitwise_or, np.bitwise_xor)]
        expected = [ballot, (own > 90).any(), (own > -90).all(), *[int(n) & 0xFFFFFFFF for n in numbers], *reduced]
        np.testing.assert_array_equal(out[:11, warp * 32 : warp * 32 + 32].T, np.tile(expected, (32, 1)))
        even = np.where(LANES % 2 == 0, ballot & 0x55555555, 0)
        np.testing.assert_array_equal(out[11, warp * 32 : warp * 32 + 32], even)
    of_block = [(x > 90).any(), (x > -90).all(), (x > 0).sum(), 1]
    np.testing.assert_array_equal(out[12:].T, np.tile(of_block, (64, 1)))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("count", [1, 127, 128, 777])
def test_a_kernel_that_compacts_an_array(kernels: Emulated, order: int, count: int) -> None:
    x = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    found, found_count = np.full(count, -1, np.int32), np.full(1, -1, np.int32)
    arrays = [x, np.array([count], np.int32), found, found_count]
    kernels.launch("compact", (1, 1, 1), (128, 1, 1), arrays, order)
    expected = np.flatnonzero(x > 0)
    np.testing.assert_array_equal(found[: found_count[0]], expected)
    assert (found[found_count[0] :] == -1).all()


@pytest.mark.parametrize("order", ORDERS)
def test_atomic_operations(kernels: Emulated, order: int) -> None:
    x = np.random.default_rng(5).integers(-999, 999, 210).astype(np.int32)
    ints, words = np.array([0, -9999, 9999], np.int32), np.zeros(213, np.uint32)
    longs, floats = np.zeros(2, np.uint64), np.zeros(1, np.float32)
    kernels.launch("atomics", (3, 1, 1), (70, 1, 1), [x, ints, words, longs, floats], order)
    np.testing.assert_array_equal(ints, [x.sum(), x.max(), x.min()])
    assert words[0] == int(x.sum()) & 0xFFFFFFFF
    assert words[1] == x.view(np.uint32).max()
    np.testing.assert_array_equal(np.sort(words[2:]), np.sort([0, *x.view(np.uint32)]))
    assert longs.view(np.int64)[0] == int(x.sum()) << 20
    assert longs[1] == 3 * 210
    assert floats[0] == x.sum()


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_that_synchronize_by_an_atomic_ticket(kernels: Emulated, order: int) -> None:
    x, partial = whole_numbers(np.random.default_rng(6), 7 * 64), np.full(7, np.nan, np.float32)
    done, ticket, total = np.zeros(7, np.uint32), np.zeros(1, np.uint32), np.full(1, np.nan, np.float32)
    kernels.launch("grid_sum", (7, 1, 1), (64, 1, 1), [x, partial, done, ticket, total], order)
    assert total[0] == x.sum(dtype=np.float64)
    assert ticket[0] == 0


@pytest.mark.parametrize("order", ORDERS)
def test_a_ticket_releases_and_acquires(kernels: Emulated, order: int) -> None:
    x = whole_numbers(np.random.default_rng(9), 7 * 64)
    partial, ticket, total = np.zeros(7 * 64, np.float32), np.zeros(1, np.uint32), np.zeros(1, np.float32)
    kernels.launch("released_sum", (7, 1, 1), (64, 1, 1), [x, partial, ticket, total], order)
    assert total[0] == 2 * x.sum(dtype=np.float64)
    assert ticket[0] == 0


@pytest.mark.parametrize("order", ORDERS)
def test_a_flag_releases_what_was_written_before(kernels: Emulated, order: int) -> None:
    number, flag, seen = np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(5, np.int32)
    kernels.launch("released_number", (5, 1, 1), (32, 1, 1), [number, flag, seen], order)
    assert (number[0], flag[0]) == (5, 1)
    assert set(seen[1:]) <= {5, -1}
    assert order != 0 or set(seen[1:]) == {5}, "later blocks have not seen the flag"


@pytest.mark.parametrize("order", ORDERS)
def test_parts_of_a_warp_that_meet(kernels: Emulated, order: int) -> None:
    x, out = np.arange(64, dtype=np.int32) * 3, np.full(64, -1, np.int32)
    kernels.launch("neighbours", (1, 1, 1), (64, 1, 1), [x, out], order)
    np.testing.assert_array_equal(out, x[np.arange(64) ^ 7])


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


@pytest.mark.parametrize("order", ORDERS)
def test_waiting_for_the_host(kernels: Emulated, order: int) -> None:
    flag, seen = np.zeros(1, np.int32), np.full(70, -1, np.int32)
    addresses = [flag.ctypes.data, seen.ctypes.data]
    launch = threading.Thread(target=kernels.call, args=("meet", (1, 1, 1), (70, 1, 1), addresses, order))
    launch.start()
    launch.join(timeout=0.05)
    assert launch.is_alive()
    assert (seen == -1).all()
    flag[0] = 7
    launch.join()
    assert (seen == 7).all()


def test_a_kernel_that_waits_without_end_is_ended(tmp_path: Path) -> None:
    kernels = Emulated(SOURCE.read_text(), tmp_path / "short.so", ["MOST_ASLEEP_S=0.1"])
    with pytest.raises(EmulationError, match=r"still calls __nanosleep after 0\.1 s"):
        kernels.launch("meet", (1, 1, 1), (70, 1, 1), [np.zeros(1, np.int32), np.zeros(70, np.int32)])


def test_launches_of_several_threads(kernels: Emulated) -> None:
    x = whole_numbers(np.random.default_rng(7), 1000)
    sums = np.full((4, 5), np.nan, np.float32)

    def launch(row: int) -> None:
        for order in range(10):
            arrays = [x, np.array([1000], np.int32), sums[row]]
            kernels.launch("block_sum", (5, 1, 1), (200, 1, 1), arrays, order)

    threads = [threading.Thread(target=launch, args=(row,)) for row in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(sums, np.tile(x.reshape(5, 200).sum(axis=1, dtype=np.float64), (4, 1)))
