"""Values and flags between a GPU and its host, with the host as another thread."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from helpers.kernels.cuda_workbench import CudaWorkbench, assert_rows
from helpers.kernels.emulator import ORDERS, Emulated
from helpers.kernels.workbench import Array, uniform
from helpers.products import sampled
from picompile_codegen import cuda
from picompile_codegen.cuda import cuda_source
from picompile_codegen.cuda.build import KernelLaunch
from picompile_codegen.specs import (
    BorrowCacheSpec,
    CopyWordsSpec,
    CountedSendMaskSpec,
    KernelSpec,
    ReceiveMaskSpec,
    ReceiveSpec,
    RmsNormSpec,
    SendMaskSpec,
    SendSpec,
    SumNormSpec,
)

# A part of a block's turn; rows that are no multiple of four; more than a turn.
DIMS = (96, 99, 4228)
# Rows, and how many of them count.
ROWS = ((1, 1), (5, 5), (5, 3))
# Neurons and how many the host computes: four at a time, one at a time, one alone, and more than a turn of one row.
MASKS = ((200, 60), (77, 55), (9, 1), (5000, 4500), (5000, 4503))
# Caches that are lent: heads, width, dtype, context. In words, more than a block takes; in halves and bytes; in words
# whose last has an element of a later position.
LENT = ((2, 64, "float16", 300), (3, 3, "float16", 51), (2, 5, "int8", 9), (1, 1, "float16", 40), (2, 7, "float32", 11))
STEP = 7
# What the other side has set in the step before.
EARLIER = STEP - 1
SLOW = "compiles a kernel per case"


def step(tokens: int, position: int = -1) -> Array:
    return np.array([tokens, position, -1, STEP, -1, -1, -1, -1], np.int32)


def flag(value: int) -> Array:
    return np.array([value], np.int32)


@sampled(slow=SLOW, dim=DIMS, counts=ROWS)
def test_send(workbench: CudaWorkbench, dim: int, counts: tuple[int, int]) -> None:
    rows, tokens = counts
    x = uniform(np.random.default_rng([dim, tokens]), tokens, dim)
    found = workbench.run(SendSpec(dim=dim, rows=rows), {"step": step(tokens), "x": x, "flag": flag(EARLIER)})
    assert_rows(found["out"], x)
    assert found["flag"].tolist() == [STEP] + [-1] * 15


@sampled(
    slow=SLOW,
    dim=(96, 99),
    sizes=MASKS,
    counts=ROWS,
    share=(0.0, 0.3, 1.0),
    # Columns that a kernel has room for beside those of the mask, whose number is an argument then, and whether they
    # are sent in words.
    room=(None, (300, True), (0, True), (22, False)),
    when=lambda room, sizes, **_: not (room and room[1]) or sizes[1] % 4 == 0,
)
def test_send_mask(
    workbench: CudaWorkbench,
    dim: int,
    sizes: tuple[int, int],
    counts: tuple[int, int],
    share: float,
    room: tuple[int, bool] | None,
) -> None:
    (neurons, columns), (rows, tokens) = sizes, counts
    rng = np.random.default_rng([*sizes, tokens])
    x, mask = uniform(rng, tokens, dim), (rng.random((tokens, neurons)) < share).astype(np.uint8)
    table = rng.permutation(neurons)[:columns].astype(np.int32)
    inputs = {"step": step(tokens), "x": x, "mask": mask, "table": table, "flag": flag(EARLIER)}
    if room is None:
        spec: KernelSpec = SendMaskSpec(dim=dim, neurons=neurons, columns=columns, rows=rows)
    else:
        inputs["columns"] = flag(columns)
        spec = CountedSendMaskSpec(dim=dim, neurons=neurons, columns=columns + room[0], rows=rows, in_words=room[1])
    found = workbench.run(spec, inputs)
    assert_rows(found["out"], x)
    assert_rows(found["out_mask"].reshape(rows, columns), mask[:, table])
    assert found["count"][0] == mask[:, table].sum()
    assert found["flag"].tolist() == [STEP] + [-1] * 15


@sampled(slow=SLOW, dim=DIMS, counts=ROWS, count=(None, 0, 1, 900))
def test_receive(workbench: CudaWorkbench, dim: int, counts: tuple[int, int], count: int | None) -> None:
    """Nobody waits for a host without work: its flag is not set, and what it shares is NaN."""
    rows, tokens = counts
    source = uniform(np.random.default_rng([dim, tokens]), tokens, dim)
    inputs = {"step": step(tokens), "flag": flag(EARLIER if count == 0 else STEP), "abandoned": flag(0)}
    inputs |= {} if count is None else {"count": flag(count)}
    inputs |= {} if count == 0 else {"source": source}
    found = workbench.run(ReceiveSpec(dim=dim, rows=rows, counted=count is not None), inputs)
    assert_rows(found["y"], 0 * source if count == 0 else source)
    if count is None:
        # One mask takes fewer neurons than a block has threads, one more.
        mask = (source > 0).astype(np.uint8)
        found = workbench.run(ReceiveMaskSpec(neurons=dim, rows=rows), inputs | {"source": mask})
        assert_rows(found["y"], mask)


@pytest.mark.parametrize("words", [8, 300])
def test_copy_words(workbench: CudaWorkbench, words: int) -> None:
    """`step` may be what is copied, so it is not read: the launch does not even have it."""
    source = np.random.default_rng(words).integers(-(2**31), 2**31, words).astype(np.int32)
    kernel = cuda.write_kernel(CopyWordsSpec(words=words))
    assert np.array_equal(workbench.run(kernel, {"source": source})["y"], source)
    (launch,) = cuda_source([kernel]).launches[kernel.name]
    assert {kernel.params[index] for index in launch.args} == {"source", "y"}


@pytest.mark.parametrize("sizes", LENT, ids=str)
def test_borrow_cache(workbench: CudaWorkbench, sizes: tuple[int, int, str, int]) -> None:
    """The positions before those of the step, bit by bit; and nothing of those behind it."""
    heads, width, dtype, context = sizes
    for share in (0.0, 0.1, 0.5, 1.0):
        position = round(share * (context - 1))
        row_bytes = context * width * np.dtype(dtype).itemsize
        bits = np.random.default_rng([heads, position]).integers(0, 256, (heads, row_bytes))
        source = bits.astype(np.uint8).view(dtype)
        inputs = {"step": step(1, position), "source": source, "flag": flag(STEP), "abandoned": flag(0)}
        found = workbench.run(BorrowCacheSpec(*sizes), inputs)["y"]
        assert found[:, : position * width].tobytes() == source[:, : position * width].tobytes()
        assert (found[:, (position + 1) * width :].view(np.uint8) == 255).all()


@dataclass(frozen=True)
class Live:
    """One kernel that runs on arrays while the host changes them."""

    launch: KernelLaunch
    params: tuple[str, ...]
    arrays: dict[str, Array]
    emulated: Emulated

    @classmethod
    def of(cls, spec: KernelSpec, path: Path, before: str, after: str) -> "Live":
        """The kernel of `spec`, with `after` in place of `before` in its source, and its arrays, all ones."""
        kernel = cuda.write_kernel(spec)
        source = cuda_source([kernel])
        assert before in source.text
        (launch,) = source.launches[kernel.name]
        arrays = {each.name: np.full(each.shape, -1, np.int64).astype(each.dtype) for each in kernel.arguments}
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


def run_with_host(live: Live, order: int, act: Callable[[], None]) -> None:
    """Run the kernel when nothing is there yet, with a host that will `act` when the kernel waits for it."""
    live.arrays["source"][:], live.arrays["y"][:] = np.nan, np.nan
    live.arrays["step"][3], live.arrays["flag"][:2], live.arrays["abandoned"][0] = STEP, EARLIER, 0

    def watch() -> None:
        while live.arrays["flag"][1] != STEP:
            time.sleep(0.001)
        act()

    host = threading.Thread(target=watch, daemon=True)
    host.start()
    live.run(order)
    host.join(timeout=10)
    assert not host.is_alive(), "the kernel did not wait"


@pytest.mark.parametrize("spec", RECEIVERS, ids=["receive", "sum"])
def test_receive_waits_for_the_host(tmp_path: Path, spec: KernelSpec) -> None:
    """No thread receives what was there before the flag was set. The wait ends as well when the host gives up."""
    live = Live.of(spec, tmp_path, _SLEEP, _TELL)
    if "x0" in live.arrays:
        live.arrays["x0"][:] = 0
    for order in ORDERS:
        expected = uniform(np.random.default_rng(order), 1, 4100)

        def act(sent: Array = expected) -> None:
            live.arrays["source"][:] = sent
            live.arrays["flag"][0] = STEP

        run_with_host(live, order, act)
        assert np.array_equal(live.arrays["y"], expected)
        assert live.arrays["abandoned"][0] == 0
    run_with_host(live, 0, lambda: live.arrays["abandoned"].__setitem__(0, 1))


_NO_PATIENCE = "#ifndef PI_PATIENCE_NS"
_PATIENCE_NS = 20_000_000


@pytest.mark.parametrize(
    "spec",
    [
        ReceiveSpec(dim=4100, rows=1, counted=False),
        ReceiveMaskSpec(neurons=77, rows=1),
        SumNormSpec(dim=4100, rows=1, terms=2, norm=None, received=True),
        # Position -1: nothing is to come, and all the same it waits.
        BorrowCacheSpec(2, 64, "float16", 300),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_a_wait_times_out(spec: KernelSpec, tmp_path: Path) -> None:
    """A kernel that waits 20 ms, instead of half a minute, reports the flag that it waited for, and no sooner."""
    live = Live.of(spec, tmp_path, _NO_PATIENCE, f"#define PI_PATIENCE_NS {_PATIENCE_NS}\n{_NO_PATIENCE}")
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
    spec: KernelSpec = SendSpec(dim=dim, rows=1)
    if masked:
        spec = SendMaskSpec(dim=dim, neurons=columns, columns=columns, rows=1)
    sent_words = dim + 1 + (columns // 4 if masked else 0)
    snapshot = _SNAPSHOT.replace("SIZE", str(sent_words))
    live = Live.of(spec, tmp_path, _SIGNAL, snapshot + _SIGNAL)
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
