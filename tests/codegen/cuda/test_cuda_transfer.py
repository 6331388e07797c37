"""Values and flags between a GPU and its host, with the host as another thread."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from test_kernels_meet import EARLIER, STEP, flag, step

from helpers.kernels.cuda_workbench import CudaWorkbench
from helpers.kernels.emulator import ORDERS, Emulated
from helpers.kernels.workbench import Array, uniform
from picompile_codegen import cuda
from picompile_codegen.cuda.build import KernelLaunch, cuda_source
from picompile_codegen.specs import (
    BorrowCacheSpec,
    CopyWordsSpec,
    KernelSpec,
    ReceiveMaskSpec,
    ReceiveSpec,
    RmsNormSpec,
    SendMaskSpec,
    SendSpec,
    SumNormSpec,
)

# Caches that are lent: heads, width, dtype, context. In words, more than a block takes; in halves and bytes; in words
# whose last has an element of a later position.
LENT = ((2, 64, "float16", 300), (3, 3, "float16", 51), (2, 5, "int8", 9), (1, 1, "float16", 40), (2, 7, "float32", 11))


def test_what_is_copied_may_be_the_step() -> None:
    """So it is not read: the launch does not even have it."""
    kernel = cuda.write_kernel(CopyWordsSpec(words=8))
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
