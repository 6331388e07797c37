"""The kernels with which host and device meet: what they lend, what they wait for, and when they give up."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from helpers.kernels.workbench import Array, Workbench, uniform
from picompile_codegen import cpu
from picompile_codegen.build import host_library as build_module
from picompile_codegen.build.host_library import build_host_library
from picompile_codegen.cpu.kernel import Kernel
from picompile_codegen.specs import (
    FLAG_SHAPE,
    BorrowCacheSpec,
    LendCacheSpec,
    ReceiveMaskSpec,
    ReceiveSpec,
    SendSpec,
    SignalSpec,
    UploadSpec,
    WaitSpec,
)
from picompile_runtime.devices.cpu.native import HostLibrary
from picompile_runtime.devices.memory import aligned_zeros

DIM, NEURONS, ROWS, STEP = 37, 45, 5, 9

SEND = cpu.write_kernel(SendSpec(dim=DIM, rows=1))
RECEIVE, COUNTED = (cpu.write_kernel(ReceiveSpec(DIM, 1, counted)) for counted in (False, True))
# Caches that are lent: heads, width, dtype, context and sequences.
LENT = [(2, 24, "float16", 50, 3), (3, 3, "float16", 51, 1), (2, 5, "int8", 9, 2), (2, 7, "float32", 300, 1)]
LENDS = {sizes: cpu.write_kernel(LendCacheSpec(*sizes)) for sizes in LENT}
BORROWS = {sizes: cpu.write_kernel(BorrowCacheSpec(*sizes[:-1])) for sizes in LENT}
RECEIVE_MASK = cpu.write_kernel(ReceiveMaskSpec(neurons=NEURONS, rows=ROWS))
WAIT, SIGNAL = (cpu.write_kernel(spec) for spec in (WaitSpec(), SignalSpec()))
EVERY = (SEND, RECEIVE, COUNTED, RECEIVE_MASK, *LENDS.values(), *BORROWS.values(), WAIT, SIGNAL)
Bound = tuple[str, Sequence[Array]]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return Workbench(tmp_path_factory.mktemp("transfer") / "host.so", EVERY)


@pytest.fixture(scope="module")
def device_library(bench: Workbench) -> HostLibrary:
    """Return a library of the same kernels with threads and a queue of its own."""
    path = bench.path.with_name("hot.so")
    build_host_library(EVERY, path)
    return HostLibrary(path)


def step(tokens: int, number: int = STEP) -> Array:
    """The step's tokens and its number, and nothing that these kernels may look at."""
    fields = np.full(8, -1, np.int32)
    fields[0], fields[3] = tokens, number
    return fields


def flag(number: int) -> Array:
    """A flag that was last set in step `number`; only its first element may be looked at."""
    words = np.full(FLAG_SHAPE, -1, np.int32)
    words[0] = number
    return words


def test_signal(bench: Workbench) -> None:
    found = bench.run(SIGNAL, {"step": step(1), "flag": flag(STEP - 1)})["flag"]
    np.testing.assert_array_equal(found, flag(STEP))


def test_upload(tmp_path: Path) -> None:
    """Also what is no multiple of a vector, and so much that threads share it."""
    bench = Workbench(tmp_path / "host.so")
    for size in (1, 64, 100, 64 * 1100 + 7):
        source = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        np.testing.assert_array_equal(bench.run(cpu.write_kernel(UploadSpec(size)), {"source": source})["y"], source)


@pytest.mark.parametrize("sizes", LENT, ids=str)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_a_cache_is_lent_and_borrowed(bench: Workbench, sizes: tuple[int, int, str, int, int], share: float) -> None:
    """The positions before the step's are, of the step's sequence, bit by bit; nothing else is."""
    heads, width, dtype, context, sequences = sizes
    position, slot = round(share * (context - 1)), sequences - 1
    rng, item_bytes = np.random.default_rng([heads, position]), np.dtype(dtype).itemsize
    cache = rng.integers(0, 256, (sequences, heads, context * width * item_bytes)).astype(np.uint8).view(dtype)
    here = step(1)
    here[1:3] = position, slot
    lent = bench.run(LENDS[sizes], {"step": here, "cache": cache})["y"]
    inputs = {"step": here, "source": lent, "flag": flag(STEP), "abandoned": flag(0)}
    for found in (lent, bench.run(BORROWS[sizes], inputs)["y"]):
        assert found[:, : position * width].tobytes() == cache[slot, :, : position * width].tobytes()
        assert (found[:, position * width :].view(np.uint8) == 255).all()


# ---- waiting ----


WAITING = {"wait": WAIT, "receive": RECEIVE, "counted": COUNTED, "mask": RECEIVE_MASK}


def arrays_of(kernel: Kernel, number: int) -> dict[str, Array]:
    """Arguments of a kernel for a step with all of its rows, whose flag was last set in step `number`."""
    arrays = {argument.name: aligned_zeros(argument.shape, argument.dtype) for argument in kernel.arguments}
    for name, array in arrays.items():
        if name == "y":
            array.reshape(-1).view(np.uint8)[:] = 255
    rows = len(arrays["y"]) if "y" in arrays else 1
    values = {"step": step(rows), "flag": flag(number), "abandoned": flag(0), "count": np.ones(1, np.int32)}
    for name in values.keys() & arrays.keys():
        arrays[name][:] = values[name]
    return arrays


def run(library: HostLibrary, kernel: Kernel, arrays: dict[str, Array]) -> None:
    library.run(library.bind([(kernel.name, [arrays[name] for name in kernel.params])]), 1)


@pytest.mark.parametrize("number", [STEP - 1, STEP + 1, 0, -STEP])
@pytest.mark.parametrize("given_up", [False, True])
@pytest.mark.parametrize("name", list(WAITING))
def test_a_waiting_kernel_goes_on_when_its_flag_is_set(
    name: str, given_up: bool, number: int, bench: Workbench
) -> None:
    """And not before: neither is the flag of another step its own. Nor does it wait for a side that has given up."""
    kernel = WAITING[name]
    arrays = arrays_of(kernel, number)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run, HostLibrary(bench.path), kernel, arrays)
        # Longer than it spins. It cannot end, whatever else this machine does.
        assert not Event().wait(0.03)
        assert not running.done()
        if "source" in arrays:
            source = arrays["source"]
            source[:] = np.random.default_rng(3).integers(0, 2, source.shape)
        arrays["abandoned" if given_up else "flag"][0] = 1 if given_up else STEP
        running.result()
    if "source" in arrays and not given_up:
        np.testing.assert_array_equal(arrays["y"], arrays["source"])
    assert (arrays["abandoned"][0], arrays["flag"][0]) == ((1, number) if given_up else (0, STEP))


@pytest.mark.parametrize("name", list(WAITING))
def test_a_wait_times_out(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel waits a millisecond in this library, instead of half a minute."""
    monkeypatch.setattr(build_module, "_COMPILE_FLAGS", (*build_module._COMPILE_FLAGS, "-DPI_PATIENCE_NS=1000000"))
    kernel = WAITING[name]
    build_host_library([kernel], tmp_path / "host.so")
    arrays = arrays_of(kernel, STEP - 1)
    run(HostLibrary(tmp_path / "host.so"), kernel, arrays)
    assert arrays["abandoned"][0] == 1
    assert arrays["flag"][0] == STEP - 1


def test_writes_before_a_flag_are_visible_after_it(bench: Workbench, device_library: HostLibrary) -> None:
    """Back and forth a thousand times, without a pause: the host sends on what it has received."""
    rounds = 1000
    values = uniform(np.random.default_rng(5), rounds, DIM)
    # A value each, where kernels may look for it: at the beginning of a cache line.
    given, returned = ([aligned_zeros((1, DIM), np.float32) for _ in values] for _ in range(2))
    there, back, middle = (aligned_zeros((1, DIM), np.float32) for _ in range(3))
    there_flag, back_flag, abandoned = (aligned_zeros(FLAG_SHAPE, np.int32) for _ in range(3))
    host, of_host, of_device = HostLibrary(bench.path), list[Bound](), list[Bound]()
    for number, value in enumerate(values):
        given[number][:], step_ = value, aligned_zeros((8,), np.int32)
        step_[:] = step(1, number + 1)
        source, target = {"flag": there_flag, "abandoned": abandoned}, {"flag": back_flag, "abandoned": abandoned}
        of_device.append(bound(SEND, step=step_, x=given[number], out=there, flag=there_flag))
        of_device.append(bound(RECEIVE, step=step_, source=back, y=returned[number], **target))
        of_host.append(bound(RECEIVE, step=step_, source=there, y=middle, **source))
        of_host.append(bound(SEND, step=step_, x=middle, out=back, flag=back_flag))
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(device_library.run, device_library.bind(of_device), 1)
        host.run(host.bind(of_host), 1)
        running.result()
    np.testing.assert_array_equal(np.concatenate(returned), values)
    assert abandoned[0] == 0


def bound(kernel: Kernel, **arrays: Array) -> Bound:
    """A call with its arguments by name."""
    return kernel.name, [arrays[name] for name in kernel.params]
