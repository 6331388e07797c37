"""The kernels with which host and device meet: what they copy, what they wait for, and when they give up."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from helpers.kernels.workbench import Array, Workbench, uniform
from picompile_codegen import cpu
from picompile_codegen.build import host_library as build_module
from picompile_codegen.build.host_library import build_host_library
from picompile_codegen.cpu import Kernel
from picompile_codegen.specs import (
    FLAG_SHAPE,
    BorrowCacheSpec,
    CopyWordsSpec,
    LendCacheSpec,
    ReceiveMaskSpec,
    ReceiveSpec,
    SendMaskSpec,
    SendSpec,
    SignalSpec,
    UploadSpec,
    WaitSpec,
)
from picompile_runtime.devices.cpu.native import HostLibrary
from picompile_runtime.devices.memory import aligned_zeros

DIM, NEURONS, COLUMNS, WORDS, ROWS, STEP = 37, 45, 11, 13, 5, 9

SENDS = {rows: cpu.write_kernel(SendSpec(dim=DIM, rows=rows)) for rows in (1, ROWS)}
MASKS = {rows: cpu.write_kernel(SendMaskSpec(DIM, NEURONS, COLUMNS, rows=rows)) for rows in (1, ROWS)}
RECEIVES = {each: cpu.write_kernel(ReceiveSpec(DIM, *each)) for each in product((1, ROWS), (False, True))}
# Caches that are lent: heads, width, dtype, context and sequences.
LENT = [(2, 24, "float16", 50, 3), (3, 3, "float16", 51, 1), (2, 5, "int8", 9, 2), (2, 7, "float32", 300, 1)]
LENDS = {sizes: cpu.write_kernel(LendCacheSpec(*sizes)) for sizes in LENT}
BORROWS = {sizes: cpu.write_kernel(BorrowCacheSpec(*sizes[:-1])) for sizes in LENT}
RECEIVED_MASKS = {rows: cpu.write_kernel(ReceiveMaskSpec(neurons=NEURONS, rows=rows)) for rows in (1, ROWS)}
COPY, WAIT, SIGNAL = (cpu.write_kernel(spec) for spec in (CopyWordsSpec(words=WORDS), WaitSpec(), SignalSpec()))
_MANY = (SENDS, MASKS, RECEIVES, RECEIVED_MASKS, LENDS, BORROWS)
EVERY = (*(kernel for each in _MANY for kernel in each.values()), COPY, WAIT, SIGNAL)
# How many rows a step has, and how many of them count.
TOKENS = [(1, 1), (ROWS, 1), (ROWS, 3), (ROWS, ROWS)]

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


def assert_set(found: Array) -> None:
    np.testing.assert_array_equal(found, flag(STEP))


@pytest.mark.parametrize(("rows", "tokens"), TOKENS)
def test_send(rows: int, tokens: int, bench: Workbench) -> None:
    random = np.random.default_rng(tokens)
    x, table = uniform(random, tokens, DIM), random.permutation(NEURONS)[:COLUMNS].astype(np.int32)
    inputs = {"step": step(tokens), "x": x, "table": table, "flag": flag(STEP - 1)}
    for share in (None, 0.0, 0.3, 1.0):
        mask = (random.uniform(size=(tokens, NEURONS)) < (share or 0)).astype(np.uint8)
        found = bench.run((SENDS if share is None else MASKS)[rows], inputs | {"mask": mask})
        np.testing.assert_array_equal(found["out"][:tokens], x)
        assert np.isnan(found["out"][tokens:]).all()
        assert_set(found["flag"])
        if share is not None:
            np.testing.assert_array_equal(found["out_mask"][:tokens], mask[:, table])
            assert (found["out_mask"][tokens:] == 255).all()
            assert found["count"][0] == mask[:, table].sum()


@pytest.mark.parametrize(("rows", "tokens"), TOKENS)
def test_receive(rows: int, tokens: int, bench: Workbench) -> None:
    """Where the host has no neuron to compute, the result is 0: the flag is not looked at, nor what it is for."""
    source = uniform(np.random.default_rng(rows), tokens, DIM)
    mask = np.random.default_rng(rows).integers(0, 2, (tokens, NEURONS)).astype(np.uint8)
    inputs = {"step": step(tokens), "abandoned": flag(0)}
    for kernel, expected, given in (
        (RECEIVES[rows, False], source, {"source": source, "flag": flag(STEP)}),
        (RECEIVES[rows, True], source, {"source": source, "flag": flag(STEP), "count": np.array([1], np.int32)}),
        (RECEIVES[rows, True], 0 * source, {"flag": flag(STEP - 1), "count": np.zeros(1, np.int32)}),
        (RECEIVED_MASKS[rows], mask, {"source": mask, "flag": flag(STEP)}),
    ):
        found = bench.run(kernel, inputs | given)
        np.testing.assert_array_equal(found["y"][:tokens], expected)
        assert (found["y"][tokens:].view(np.uint8) == 255).all()
        np.testing.assert_array_equal(found["flag"], given["flag"])
        np.testing.assert_array_equal(found["abandoned"], flag(0))


def test_copy_words_and_signal(bench: Workbench) -> None:
    source = np.random.default_rng(1).integers(-(2**31), 2**31, WORDS).astype(np.int32)
    np.testing.assert_array_equal(bench.run(COPY, {"source": source})["y"], source)
    assert_set(bench.run(SIGNAL, {"step": step(1), "flag": flag(STEP - 1)})["flag"])


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


WAITING = {"wait": WAIT, "receive": RECEIVES[ROWS, False], "counted": RECEIVES[1, True], "mask": RECEIVED_MASKS[ROWS]}


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
        of_device.append(bound(SENDS[1], step=step_, x=given[number], out=there, flag=there_flag))
        of_device.append(bound(RECEIVES[1, False], step=step_, source=back, y=returned[number], **target))
        of_host.append(bound(RECEIVES[1, False], step=step_, source=there, y=middle, **source))
        of_host.append(bound(SENDS[1], step=step_, x=middle, out=back, flag=back_flag))
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(device_library.run, device_library.bind(of_device), 1)
        host.run(host.bind(of_host), 1)
        running.result()
    np.testing.assert_array_equal(np.concatenate(returned), values)
    assert abandoned[0] == 0


def bound(kernel: Kernel, **arrays: Array) -> Bound:
    """A call with its arguments by name."""
    return kernel.name, [arrays[name] for name in kernel.params]
