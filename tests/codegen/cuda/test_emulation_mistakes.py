"""The emulation reports what a GPU forbids, with a text that says which thread did what, and where."""

from pathlib import Path

import numpy as np
import pytest

from helpers.kernels.emulator import ORDERS, Emulated, EmulationError

SOURCE = (Path(__file__).parent / "mistakes.cu").read_text()
MATRICES = (Path(__file__).parent / "matrix_mistakes.cu").read_text()


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated(SOURCE + MATRICES, tmp_path_factory.mktemp("mistakes") / "mistakes.so")


def line_of(symbol: str) -> int:
    lines = SOURCE.splitlines()
    start = next(number for number, line in enumerate(lines) if f" {symbol}(" in line)
    return next((number for number in range(start, len(lines)) if "MISTAKE" in lines[number]), 0) + 1


def launch(kernels: Emulated, symbol: str, order: int, blocks: int = 1) -> str:
    """64 threads a block, on 64 zeros. Returns the error's text; "" if there was none."""
    try:
        kernels.launch(symbol, (blocks, 1, 1), (64, 1, 1), [np.zeros(64, np.int32)], order)
    except EmulationError as error:
        return str(error)
    return ""


# Where thread 0 waits, and the thread that it waits for.
BARRIERS = {
    "barrier_that_one_skips": ("__syncthreads in line {line}", "thread (3, 0, 0), which has ended"),
    "barriers_of_two_places": ("__syncthreads in line {line}", "thread (2, 0, 0), which waits at __syncthreads"),
    "barrier_and_shuffle": ("__syncthreads in line {line}", "thread (1, 0, 0), which waits at __shfl_xor_sync"),
    "shuffle_that_some_skip": (
        "__shfl_down_sync in line {line} with mask 0xffffffff",
        "thread (16, 0, 0), which has ended",
    ),
    "votes_that_differ": (
        "__any_sync in line {line} with mask 0xffffffff",
        "thread (7, 0, 0), which waits at __ballot_sync",
    ),
}


@pytest.mark.parametrize("symbol", BARRIERS)
def test_deadlocks_are_reported(kernels: Emulated, symbol: str) -> None:
    place, missing = BARRIERS[symbol]
    place = place.format(line=line_of(symbol))
    for order in ORDERS:
        text = launch(kernels, symbol, order)
        assert text.startswith(f"{symbol}: block (0, 0, 0), thread (0, 0, 0) waits at {place} for {missing}")


FAULTS = {
    "masks_that_differ": "for thread (5, 0, 0), which waits at __any_sync in line {line} with mask 0x7fffffff",
    "mask_without_itself": "thread (0, 0, 0) is not in its own mask: __shfl_sync in line {line} with mask 0xfffffffe",
    "width_of_twelve": "gives a width that is no power of two up to 32: __shfl_sync in line {line}",
    "shuffle_from_outside": "reads lane 9 in __shfl_sync in line {line}, which mask 0x000000ff does not name",
    "misaligned_read": "as 'const struct int2', which is not aligned to 8 bytes (line {line})",
    "misaligned_write": "as 'struct uint4', which is not aligned to 16 bytes (line {line})",
    "misaligned_halves": "as 'const struct __half2', which is not aligned to 4 bytes (line {line})",
    "misaligned_integer": "which is not aligned to 4 bytes (line {line})",
    "outside_of_shared": "uses index 4 of an array 'int [4]' (line {line})",
    "outside_of_local": "uses index -1 of an array 'int [4]' (line {line})",
    "read_in_front": "reads 4 bytes at address",
    "read_behind": "reads 8 bytes at argument 0 + 256, outside of all arguments (line {line})",
    "write_behind": "writes 4 bytes at argument 0 + 256, outside of all arguments (line {line})",
    "atomic_behind": "atomically uses 4 bytes at argument 0 + 256, outside of all arguments (line {line})",
    "far_away": "atomically uses 4 bytes at address 0x10, outside of all arguments (line {line})",
    "shift_by_forty": "shifts 'int' by 40 (line {line})",
    "divides_by_zero": "divides an integer by zero (line {line})",
    "deep_stack": "needs more than 65536 bytes of stack",
}


@pytest.mark.parametrize("symbol", FAULTS)
def test_faults_of_a_thread(kernels: Emulated, symbol: str) -> None:
    """Behind each the library can launch again."""
    assert FAULTS[symbol].format(line=line_of(symbol)) in launch(kernels, symbol, 0)
    out = np.zeros(64, np.int32)
    kernels.launch("bounded", (1, 1, 1), (48, 1, 1), [out])
    np.testing.assert_array_equal(out, np.arange(64) < 48)


# Blocks, and the two accesses: whichever comes first, the other one is the error.
RACES = {
    "read_of_the_next": (1, "reads", "writes"),
    "read_of_the_next_byte": (1, "reads", "writes"),
    "write_after_read": (1, "writes", "reads"),
    "writes_of_one_place": (1, "writes", "writes"),
    "sum_without_atomics": (1, "reads", "writes"),
    "read_of_a_counter": (1, "reads", "atomically uses"),
    "shuffle_as_a_fence": (1, "reads", "writes"),
    "warps_that_meet_alone": (1, "reads", "writes"),
    "halves_of_a_warp_that_meet_alone": (1, "reads", "writes"),
    "blocks_that_share": (2, "reads", "writes"),
    "read_of_the_other_counter": (2, "reads", "atomically uses"),
    "read_without_a_ticket": (2, "reads", "writes"),
    "ticket_without_fence": (2, "reads", "writes"),
    "ticket_with_a_late_write": (2, "reads", "writes"),
    "write_behind_a_releasing_ticket": (2, "reads", "writes"),
    "write_behind_a_releasing_flag": (2, "reads", "writes"),
}


@pytest.mark.parametrize("symbol", RACES)
def test_races(kernels: Emulated, symbol: str) -> None:
    blocks, *verbs = RACES[symbol]
    body = SOURCE.split(f" {symbol}(")[1].split("\n}\n")[0]
    for order in (*ORDERS, 4, 5):
        text = launch(kernels, symbol, order, blocks)
        assert "and nothing orders the two (line " in text
        assert any(f") {verb} " in text for verb in verbs)
        assert ("argument 0 + " if "__shared__" not in body else "shared memory + ") in text
        assert (" of block (" in text) == (blocks > 1)


OF_MATRICES = {
    "mma_that_some_skip": "ends|waits at mma.m16n8k16 in line",
    "misaligned_row": "not aligned to 16 bytes",
    "misaligned_copy": "starts a copy that is not aligned",
    "copy_to_global_memory": "starts a copy that is not to shared memory",
    "copy_without_a_wait": "ends while copies to shared memory are under way",
    "copy_without_a_barrier": "nothing orders the two",
    "copy_over_what_others_read": "nothing orders the two",
}


@pytest.mark.parametrize("symbol", OF_MATRICES)
def test_mistakes_with_matrices(kernels: Emulated, symbol: str) -> None:
    for order in ORDERS:
        with pytest.raises(EmulationError, match=OF_MATRICES[symbol]):
            kernels.launch(symbol, (1, 1, 1), (64, 1, 1), [np.zeros(256, np.uint32), np.zeros(256, np.uint32)], order)


def test_what_has_not_arrived_is_not_read_as_if_it_had(kernels: Emulated) -> None:
    """Some copies arrive at once and some late: a thread that does not wait for its own sees the difference."""
    x, found = np.full(256, 5, np.uint32), set()
    for order in ORDERS:
        y = np.zeros(256, np.uint32)
        kernels.launch("copy_read_before_the_wait", (1, 1, 1), (64, 1, 1), [x, y], order)
        found.add(int(y[0]))
    assert found == {5, 2**32 - 1}


@pytest.mark.parametrize(
    ("symbol", "grid", "block", "text"),
    [
        ("bounded", (1, 1, 1), (49, 1, 1), "49 threads in a block, but __launch_bounds__ says 48"),
        ("deep_stack", (1, 1, 1), (1024, 2, 1), "2048 threads in a block, but __launch_bounds__ says 1024"),
        ("bounded", (1, 65536, 1), (1, 1, 1), "no GPU takes that"),
        (
            "mask_without_threads",
            (1, 1, 1),
            (48, 1, 1),
            r"thread \(32, 0, 0\) names lanes that the block does not have",
        ),
    ],
)
def test_invalid_launches_are_refused(kernels, symbol, grid, block, text) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(EmulationError, match=text):
        kernels.launch(symbol, grid, block, [np.zeros(64, np.int32)])
