"""The emulation reports what a GPU forbids, with a text that says which thread did what, and where."""

import ctypes
import signal
from pathlib import Path

import numpy as np
import pytest

from helpers.kernels.emulator import ORDERS, Emulated, EmulationError

SOURCE = (Path(__file__).parent / "mistakes.cu").read_text()
KERNEL = 'extern "C" __global__ void kernel'


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated(SOURCE, tmp_path_factory.mktemp("mistakes") / "mistakes.so")


def line_of(symbol: str) -> int:
    lines = SOURCE.splitlines()
    start = next(number for number, line in enumerate(lines) if f" {symbol}(" in line)
    return next(number for number in range(start, len(lines)) if "MISTAKE" in lines[number]) + 1


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


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("symbol", BARRIERS)
def test_deadlocks_are_reported(kernels: Emulated, symbol: str, order: int) -> None:
    text = launch(kernels, symbol, order)
    place, missing = BARRIERS[symbol]
    place = place.format(line=line_of(symbol))
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
    line = line_of(symbol) if "{line}" in FAULTS[symbol] else 0
    assert FAULTS[symbol].format(line=line) in launch(kernels, symbol, 0)


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


@pytest.mark.parametrize("order", [*ORDERS, 4, 5])
@pytest.mark.parametrize("symbol", RACES)
def test_races(kernels: Emulated, symbol: str, order: int) -> None:
    blocks, *verbs = RACES[symbol]
    text = launch(kernels, symbol, order, blocks)
    assert "and nothing orders the two (line " in text
    assert any(f") {verb} " in text for verb in verbs)
    assert ("argument 0 + " if "__shared__" not in body(symbol) else "shared memory + ") in text
    assert (" of block (" in text) == (blocks > 1)


def body(symbol: str) -> str:
    return SOURCE.split(f" {symbol}(")[1].split("\n}\n")[0]


def test_a_mask_of_missing_threads_is_reported(kernels: Emulated) -> None:
    with pytest.raises(EmulationError, match=r"thread \(32, 0, 0\) names lanes that the block does not have"):
        kernels.launch("mask_without_threads", (1, 1, 1), (48, 1, 1), [np.zeros(64, np.int32)])


def test_a_library_can_launch_again_after_errors(kernels: Emulated) -> None:
    for symbol in (*BARRIERS, *FAULTS):
        assert launch(kernels, symbol, 2)
        out = np.zeros(64, np.int32)
        kernels.launch("bounded", (1, 1, 1), (48, 1, 1), [out])
        np.testing.assert_array_equal(out, np.arange(64) < 48)


def test_signal_handlers_are_restored(kernels: Emulated) -> None:
    libc, ignored = ctypes.CDLL(None), 1
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    before = libc.signal(signal.SIGFPE, ignored)
    assert "divides an integer by zero" in launch(kernels, "divides_by_zero", 0)
    assert libc.signal(signal.SIGFPE, before) == ignored


def test_unmapped_memory_is_reported(kernels: Emulated) -> None:
    """Memory of launches by address is not known: the processor says so."""
    out, text = np.zeros(64, np.int32), rf"uses address 0x10, where no memory is \(line {line_of('far_away')}\)"
    with pytest.raises(EmulationError, match=text):
        kernels.call("far_away", (1, 1, 1), (64, 1, 1), [out.ctypes.data])


@pytest.mark.parametrize(
    ("symbol", "grid", "block", "order", "text"),
    [
        ("bounded", (1, 1, 1), (49, 1, 1), 0, "bounded: 49 threads in a block, but __launch_bounds__ says 48"),
        ("deep_stack", (1, 1, 1), (1024, 2, 1), 0, "2048 threads in a block, but __launch_bounds__ says 1024"),
        ("absent", (1, 1, 1), (1, 1, 1), 0, "absent: no kernel of this name"),
        ("bounded", (0, 1, 1), (1, 1, 1), 0, r"grid \(0, 1, 1\), block \(1, 1, 1\): no GPU takes that"),
        ("bounded", (1, 65536, 1), (1, 1, 1), 0, "no GPU takes that"),
        ("bounded", (1, 1, 1), (1, 1, 65), 0, "no GPU takes that"),
        ("bounded", (1, 1, 1), (1, 1, 1), -1, "no thread order -1"),
    ],
)
def test_invalid_launches_are_refused(kernels, symbol, grid, block, order, text) -> None:  # type: ignore[no-untyped-def]
    out = np.zeros(64, np.int32)
    with pytest.raises(EmulationError, match=text):
        kernels.launch(symbol, grid, block, [out], order)
    assert (out == 0).all()


def test_arguments(kernels: Emulated) -> None:
    memory = np.zeros(96, np.int32)
    with pytest.raises(EmulationError, match="bounded: 1 parameters, but 2 arguments"):
        kernels.launch("bounded", (1, 1, 1), (1, 1, 1), [memory, np.zeros(1)])
    with pytest.raises(EmulationError, match="arguments 0 and 1 overlap, but are not the same array"):
        kernels.launch("bounded", (1, 1, 1), (1, 1, 1), [memory[:64], memory[32:]])
    memory.flags.writeable = False
    with pytest.raises(EmulationError, match="bounded: writes to argument 0, which is read-only"):
        kernels.launch("bounded", (1, 1, 1), (1, 1, 1), [memory])
    assert (memory == 0).all()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("void kernel() {}", "the source has no kernel"),
        (KERNEL + "(int *x) { *x = absent(); }", "'absent' was not declared|‘absent’ was not declared"),
        ("#include <cuda_fp16.h>\n" + KERNEL + "(half *x) { *x = *x + 1.0f; }", "ambiguous overload"),
        (KERNEL + "(uint4 *x) { *x = make_uint4(1, 2, 3, 4, 5, 6, 7, 8); }", "too many arguments"),
    ],
)
def test_sources_that_do_not_compile(source: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(EmulationError, match=text):
        Emulated(source, tmp_path / "bad.so")


def test_the_emulated_library_exports_its_interface_alone(kernels: Emulated) -> None:
    library = ctypes.CDLL(str(kernels.path))
    assert library.pi_params(b"bounded") == 1
    assert library.pi_params(b"absent") == -1
    assert not hasattr(library, "bounded")
