"""Values and flags between a GPU and its host, with the host as another thread."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from helpers.kernels.cuda_workbench import CudaWorkbench
from helpers.kernels.emulator import ORDERS, Emulated
from helpers.kernels.workbench import Array, uniform
from picompile_codegen import cuda
from picompile_codegen.cuda import CudaKernel, cuda_source
from picompile_codegen.cuda.build import KernelLaunch
from picompile_codegen.specs import (
    BorrowCacheSpec,
    CopyWordsSpec,
    CountedSendMaskSpec,
    KernelArgument,
    KernelSpec,
    ReceiveMaskSpec,
    ReceiveSpec,
    RmsNormSpec,
    SendMaskSpec,
    SendSpec,
    SumNormSpec,
)

CHUNK = 5
# A part of a block's turn; rows that are no multiple of four; more than a turn.
DIMS = (96, 99, 4228)
# Rows, and how many of them count.
ROWS = [(1, 1), (CHUNK, CHUNK), (CHUNK, 3)]
# Neurons and how many the host computes: four at a time, one at a time, none but one, and more than a turn of one row.
MASKS = ((200, 60), (77, 55), (9, 1), (5000, 4503))
# Of those that share a kernel: sizes, room for more, and whether they are sent in words.
COUNTED = (((200, 60), 100, True), ((200, 60), 0, False), ((77, 55), 22, False), ((5000, 4500), 300, True))
# Neurons of masks that are received: few, and more than a block takes.
RECEIVED = (77, 5000)
# Caches that are lent: heads, width, dtype, context. In words, more than a block takes; in halves and bytes; in words
# whose last has an element of a later position.
LENT = [(2, 64, "float16", 300), (3, 3, "float16", 51), (2, 5, "int8", 9), (1, 1, "float16", 40), (2, 7, "float32", 11)]
STEP = 7
# What the other side has set in the step before.
EARLIER = STEP - 1


def step(tokens: int) -> Array:
    return np.array([tokens, -1, -1, STEP, -1, -1, -1, -1], np.int32)


def flag(value: int) -> Array:
    return np.array([value], np.int32)


def send_mask(sizes: tuple[int, int], rows: int) -> CudaKernel:
    # Odd and even sizes of both.
    return cuda.write_kernel(
        SendMaskSpec(dim=99 if sizes[0] % 2 else 96, neurons=sizes[0], columns=sizes[1], rows=rows)
    )


def counted_send_mask(neurons: int, most: int, rows: int, in_words: bool) -> CudaKernel:
    return cuda.write_kernel(CountedSendMaskSpec(dim=96, neurons=neurons, columns=most, rows=rows, in_words=in_words))


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> CudaWorkbench:
    built = [cuda.write_kernel(SendSpec(dim=dim, rows=rows)) for dim in DIMS for rows in (1, CHUNK)]
    built += [send_mask(*case) for case in product(MASKS, (1, CHUNK))]
    for (sizes, room, in_words), rows in product(COUNTED, (1, CHUNK)):
        built.append(counted_send_mask(sizes[0], sizes[1] + room, rows, in_words))
    for dim, rows, counted in product(DIMS, (1, CHUNK), (False, True)):
        built.append(cuda.write_kernel(ReceiveSpec(dim=dim, rows=rows, counted=counted)))
    built += [
        cuda.write_kernel(ReceiveMaskSpec(neurons=neurons, rows=rows)) for neurons in RECEIVED for rows in (1, CHUNK)
    ]
    built += [cuda.write_kernel(CopyWordsSpec(words=words)) for words in (8, 300)]
    built += [cuda.write_kernel(BorrowCacheSpec(*sizes)) for sizes in LENT]
    return CudaWorkbench(tmp_path_factory.mktemp("transfer") / "device.so", built)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("rows", "tokens"), ROWS)
def test_send(workbench: CudaWorkbench, dim: int, rows: int, tokens: int) -> None:
    x = uniform(np.random.default_rng([dim, tokens]), tokens, dim)
    result = workbench.run(
        cuda.write_kernel(SendSpec(dim=dim, rows=rows)), {"step": step(tokens), "x": x, "flag": flag(EARLIER)}
    )
    assert np.array_equal(result["out"][:tokens], x)
    assert np.isnan(result["out"][tokens:]).all()
    assert result["flag"].tolist() == [STEP] + [-1] * 15


@pytest.mark.parametrize("sizes", MASKS, ids=str)
@pytest.mark.parametrize(("rows", "tokens"), ROWS)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_send_mask(workbench: CudaWorkbench, sizes: tuple[int, int], rows: int, tokens: int, share: float) -> None:
    rng = np.random.default_rng([*sizes, tokens])
    kernel = send_mask(sizes, rows)
    x = uniform(rng, tokens, kernel.arguments[1].shape[1])
    mask = (rng.random((tokens, sizes[0])) < share).astype(np.uint8)
    table = rng.permutation(sizes[0])[: sizes[1]].astype(np.int32)
    inputs = {"step": step(tokens), "x": x, "mask": mask, "table": table, "flag": flag(EARLIER)}
    result = workbench.run(kernel, inputs)
    assert np.array_equal(result["out"][:tokens], x)
    assert np.array_equal(result["out_mask"][:tokens], mask[:, table])
    assert np.isnan(result["out"][tokens:]).all() and (result["out_mask"][tokens:] == 255).all()
    assert result["count"][0] == mask[:, table].sum()
    assert result["flag"].tolist() == [STEP] + [-1] * 15


@pytest.mark.parametrize(("sizes", "room", "in_words"), COUNTED, ids=str)
@pytest.mark.parametrize(("rows", "tokens"), ROWS)
def test_masks_of_several_sizes_share_a_kernel(
    workbench: CudaWorkbench, sizes: tuple[int, int], room: int, in_words: bool, rows: int, tokens: int
) -> None:
    """The number of columns is an argument, and there is memory for no more of them."""
    rng, (neurons, columns) = np.random.default_rng([*sizes, tokens]), sizes
    x = uniform(rng, tokens, 96)
    mask = (rng.random((tokens, neurons)) < 0.3).astype(np.uint8)
    table = rng.permutation(neurons)[:columns].astype(np.int32)
    inputs = {"step": step(tokens), "x": x, "mask": mask, "table": table, "flag": flag(EARLIER)}
    result = workbench.run(
        counted_send_mask(neurons, columns + room, rows, in_words), inputs | {"columns": np.array([columns], np.int32)}
    )
    assert np.array_equal(result["out"][:tokens], x)
    sent = result["out_mask"].reshape(rows, columns)
    assert np.array_equal(sent[:tokens], mask[:, table]) and (sent[tokens:] == 255).all()
    assert result["count"][0] == mask[:, table].sum()
    assert result["flag"].tolist() == [STEP] + [-1] * 15


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("rows", "tokens"), ROWS)
@pytest.mark.parametrize("count", [None, 1, 900])
def test_receive(workbench: CudaWorkbench, dim: int, rows: int, tokens: int, count: int | None) -> None:
    source = uniform(np.random.default_rng([dim, tokens]), tokens, dim)
    inputs = {"step": step(tokens), "source": source, "flag": flag(STEP), "abandoned": flag(0)}
    if count is not None:
        inputs["count"] = np.array([count], np.int32)
    result = workbench.run(cuda.write_kernel(ReceiveSpec(dim=dim, rows=rows, counted=count is not None)), inputs)
    assert np.array_equal(result["y"][:tokens], source)
    assert np.isnan(result["y"][tokens:]).all()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("rows", "tokens"), ROWS)
def test_nobody_waits_for_a_host_without_work(workbench: CudaWorkbench, dim: int, rows: int, tokens: int) -> None:
    """Its flag is not set, and what it shares is NaN."""
    inputs = {"step": step(tokens), "count": flag(0), "flag": flag(EARLIER), "abandoned": flag(0)}
    result = workbench.run(cuda.write_kernel(ReceiveSpec(dim=dim, rows=rows, counted=True)), inputs)
    assert (result["y"][:tokens] == 0).all()
    assert np.isnan(result["y"][tokens:]).all()


@pytest.mark.parametrize("neurons", RECEIVED)
@pytest.mark.parametrize(("rows", "tokens"), ROWS)
def test_receive_mask(workbench: CudaWorkbench, neurons: int, rows: int, tokens: int) -> None:
    source = np.random.default_rng([neurons, tokens]).integers(0, 2, (tokens, neurons)).astype(np.uint8)
    inputs = {"step": step(tokens), "source": source, "flag": flag(STEP), "abandoned": flag(0)}
    result = workbench.run(cuda.write_kernel(ReceiveMaskSpec(neurons=neurons, rows=rows)), inputs)
    assert np.array_equal(result["y"][:tokens], source)
    assert (result["y"][tokens:] == 255).all()


@pytest.mark.parametrize("words", [8, 300])
def test_copy_words(workbench: CudaWorkbench, words: int) -> None:
    """`step` may be what is copied, so it is not read: the launch does not even have it."""
    source = np.random.default_rng(words).integers(-(2**31), 2**31, words).astype(np.int32)
    kernel = cuda.write_kernel(CopyWordsSpec(words=words))
    assert np.array_equal(workbench.run(kernel, {"source": source})["y"], source)
    (launch,) = cuda_source([kernel]).launches[kernel.name]
    assert {kernel.params[index] for index in launch.args} == {"source", "y"}


@pytest.mark.parametrize("sizes", LENT, ids=str)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_borrow_cache(workbench: CudaWorkbench, sizes: tuple[int, int, str, int], share: float) -> None:
    """The positions before those of the step, bit by bit; and nothing of those behind it."""
    heads, width, dtype, context = sizes
    position = round(share * (context - 1))
    bits = np.random.default_rng([heads, position]).integers(
        0, 256, (heads, context * width * np.dtype(dtype).itemsize)
    )
    source, here = bits.astype(np.uint8).view(dtype), step(1)
    here[1] = position
    inputs = {"step": here, "source": source, "flag": flag(STEP), "abandoned": flag(0)}
    found = workbench.run(cuda.write_kernel(BorrowCacheSpec(*sizes)), inputs)["y"]
    assert found[:, : position * width].tobytes() == source[:, : position * width].tobytes()
    assert (found[:, (position + 1) * width :].view(np.uint8) == 255).all()


def poisoned(argument: KernelArgument) -> Array:
    return np.full(argument.shape, -1, np.int64).astype(argument.dtype)


@dataclass(frozen=True)
class Live:
    """One kernel that runs on arrays while the host changes them."""

    launch: KernelLaunch
    params: tuple[str, ...]
    arrays: dict[str, Array]
    emulated: Emulated

    @classmethod
    def of(cls, kernel: CudaKernel, path: Path, before: str, after: str) -> "Live":
        """`kernel`, with `after` in place of `before` in its source."""
        source = cuda_source([kernel])
        assert before in source.text
        (launch,) = source.launches[kernel.name]
        arrays = {each.name: poisoned(each) for each in kernel.arguments}
        return cls(launch, kernel.params, arrays, Emulated(source.text.replace(before, after), path / "device.so"))

    def run(self, order: int) -> None:
        addresses = [self.arrays[self.params[index]].ctypes.data for index in self.launch.args]
        extents = (self.launch.grid.x, self.launch.grid.y, 1), (self.launch.grid.threads, 1, 1)
        self.emulated.call(self.launch.symbol, *extents, addresses, order)


# Tells the host, in an element of the flag that nobody uses, that the kernel waits.
_SLEEP = "__nanosleep(100);"
_TELL = "((volatile int *)flag)[1] = STEP, __nanosleep(100);".replace("STEP", str(STEP))


RECEIVERS: list[KernelSpec] = [
    # Two blocks, of which the second has little to do.
    ReceiveSpec(dim=4100, rows=1, counted=True),
    SumNormSpec(dim=4100, rows=1, terms=2, norm=RmsNormSpec(4100, 1, 1e-5), received=True, counted=True),
]


@pytest.fixture(scope="module", params=RECEIVERS, ids=["receive", "sum"])
def receiving(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Live:
    live = Live.of(cuda.write_kernel(request.param), tmp_path_factory.mktemp("receiving"), _SLEEP, _TELL)
    if "x0" in live.arrays:
        live.arrays["x0"][:] = 0
    return live


def begin_to_wait(live: Live, act: Callable[[], None]) -> threading.Thread:
    """Nothing is there yet; a host that will `act` when the kernel waits for it."""
    live.arrays["source"][:], live.arrays["y"][:] = np.nan, np.nan
    live.arrays["step"][3], live.arrays["flag"][:2], live.arrays["abandoned"][0] = STEP, EARLIER, 0

    def watch() -> None:
        while live.arrays["flag"][1] != STEP:
            time.sleep(0.001)
        act()

    host = threading.Thread(target=watch, daemon=True)
    host.start()
    return host


@pytest.mark.parametrize("order", ORDERS)
def test_receive_waits_for_the_host(receiving: Live, order: int) -> None:
    """No thread receives what was there before the flag was set."""
    expected = uniform(np.random.default_rng(order), 1, 4100)

    def act() -> None:
        receiving.arrays["source"][:] = expected
        receiving.arrays["flag"][0] = STEP

    host = begin_to_wait(receiving, act)
    receiving.run(order)
    host.join(timeout=10)
    assert np.array_equal(receiving.arrays["y"], expected)
    assert receiving.arrays["abandoned"][0] == 0


def test_receive_ends_when_the_host_gives_up(receiving: Live) -> None:
    def act() -> None:
        receiving.arrays["abandoned"][0] = 1

    host = begin_to_wait(receiving, act)
    receiving.run(0)
    host.join(timeout=10)
    assert not host.is_alive(), "it did not wait"


_NO_PATIENCE = "#ifndef PI_PATIENCE_NS"
_PATIENCE_NS = 20_000_000


@pytest.mark.parametrize(
    "kernel",
    [
        cuda.write_kernel(ReceiveSpec(dim=4100, rows=1, counted=False)),
        cuda.write_kernel(ReceiveMaskSpec(neurons=77, rows=1)),
        cuda.write_kernel(SumNormSpec(dim=4100, rows=1, terms=2, norm=None, received=True)),
        # Position -1: nothing is to come, and all the same it waits.
        cuda.write_kernel(BorrowCacheSpec(2, 64, "float16", 300)),
    ],
)
def test_a_wait_times_out(kernel: CudaKernel, tmp_path: Path) -> None:
    """A kernel that waits 20 ms, instead of half a minute, reports the flag that it waited for, and no sooner."""
    live = Live.of(kernel, tmp_path, _NO_PATIENCE, f"#define PI_PATIENCE_NS {_PATIENCE_NS}\n{_NO_PATIENCE}")
    live.arrays["step"][3], live.arrays["flag"][0], live.arrays["abandoned"][0] = STEP, EARLIER, 0
    begun_ns = time.monotonic_ns()
    live.run(0)
    assert time.monotonic_ns() - begun_ns >= _PATIENCE_NS
    flag, abandoned = (live.arrays[name] for name in ("flag", "abandoned"))
    distance = np.int64(flag.ctypes.data - abandoned.ctypes.data).astype(np.int32)
    assert abandoned.tolist() == [1, -1, -1, distance, EARLIER] + [-1] * 11
    assert live.arrays["flag"][0] == EARLIER


# In place of the host, which sees what is there at the moment when the flag is set: a copy of it.
_SIGNAL = "pi_store_release_sys(flag, step);"
_SNAPSHOT = "for (int i = 16; i < 16 + SIZE; ++i) flag[i + SIZE] = flag[i];"


@pytest.mark.parametrize("masked", [False, True])
def test_the_flag_is_set_last(tmp_path: Path, masked: bool) -> None:
    """All that was sent, of all threads, is there by then. The flag lies before it in memory, and its copy behind."""
    dim, columns = 2047, 2048
    kernel = (
        cuda.write_kernel(SendMaskSpec(dim=dim, neurons=columns, columns=columns, rows=1))
        if masked
        else cuda.write_kernel(SendSpec(dim=dim, rows=1))
    )
    sent_words = dim + 1 + (columns // 4 if masked else 0)
    snapshot = _SNAPSHOT.replace("SIZE", str(sent_words))
    live = Live.of(kernel, tmp_path, _SIGNAL, snapshot + _SIGNAL)
    rng = np.random.default_rng(dim)
    x, mask = uniform(rng, 1, dim), rng.integers(0, 2, (1, columns)).astype(np.uint8)
    live.arrays.update({"step": step(1), "x": x, "mask": mask, "table": np.arange(columns, dtype=np.int32)})
    for order in ORDERS:
        memory = np.full(16 + 2 * sent_words, -1, np.int32)
        sent, copy = memory[16 : 16 + sent_words], memory[16 + sent_words :]
        live.arrays.update({"flag": memory, "out": sent, "out_mask": sent[dim + 1 :]})
        live.run(order)
        assert memory[0] == STEP
        assert np.array_equal(copy[:dim].view(np.float32), x[0])
        assert not masked or np.array_equal(copy[dim + 1 :].view(np.uint8), mask[0])
