"""The exchange of flags that a GPU is asked for before a hybrid step relies on it, on a stand-in for the GPU."""

import ctypes
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.kernels.emulator import Emulated
from helpers.toys.toy_gpu import CUBIN, IMAGES, PTX
from picompile_codegen import cuda
from picompile_codegen.cuda.build import cuda_source
from picompile_codegen.specs import PingPongSpec
from picompile_runtime import MachineError
from picompile_runtime.devices.cpu.native import HostLibrary
from picompile_runtime.devices.cuda import CudaAccelerator, CudaImages, GpuLaunch, ping_pong
from picompile_runtime.devices.cuda import open as opening

SOURCE = cuda_source([cuda.write_kernel(PingPongSpec())])
(LAUNCH,) = SOURCE.launches["ping_pong"]
PING_PONG = CudaImages(
    89, 89, CUBIN, PTX, {"ping_pong": (GpuLaunch(LAUNCH.symbol, (1, 1, 1), (LAUNCH.grid.threads, 1, 1), LAUNCH.args),)}
)
# A kernel may have begun before the host wrote the first flag, or after; then all that it wrote appears at its end, in
# no order.
UNSEEN = (
    "(the GPU did not see the host's flag, in which it saw 0|the GPU answered, and the host did not see it|"
    "the host saw the GPU's flag before the words)"
)
# The kernel waits for a flag for half a second instead of one and a half.
TEXT = SOURCE.text.replace("PI_PING_PATIENCE_NS 1500000000ull", "PI_PING_PATIENCE_NS 500000000ull")
Opened = Callable[..., CudaAccelerator]
# The words arrive later than their flag, or not at all.
WORDS = "= pi_load_shared(sent + at);"


@pytest.fixture(scope="session")
def host(host_code: Path) -> HostLibrary:
    return HostLibrary(host_code)


@pytest.fixture
def opened(fake_cuda: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Return a function that makes accelerators with the kernel, whose copy of words may be another."""
    devices = []

    def opened(copy: str = WORDS, images: CudaImages = PING_PONG) -> CudaAccelerator:
        kernel = tmp_path / f"kernel{len(copy)}.so"
        if not kernel.exists():
            Emulated(TEXT.replace(WORDS, copy), kernel)
        monkeypatch.setenv("FAKE_CUDA_KERNELS", str(kernel))
        devices.append(CudaAccelerator(images))
        return devices[-1]

    yield opened
    for device in devices:
        device.close()


def test_both_sides_see_what_the_other_writes(
    opened: Opened, host: HostLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = opened()
    for rounds in (1, 100, 1000):
        found = ping_pong(device, host, rounds)
        assert found.rounds == rounds and 0 < found.p50_s <= found.p99_s
    for rounds in (0, -1, 2**20 + 1):
        with pytest.raises(ValueError, match="rounds must be from 1"):
            ping_pong(device, host, rounds)
    # As if the host had given up in a round that was answered.
    exchange = host.ping_pong
    monkeypatch.setattr(host, "ping_pong", lambda *arguments: (9, exchange(*arguments)[1]))
    with pytest.raises(MachineError, match=r"the GPU answered, and the host did not see it .*round trip 9 of 20"):
        ping_pong(device, host, 20)


def test_a_gpu_that_does_not_see_the_host_raises(
    opened: Opened, host: HostLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has one line and comes within seconds; the accelerator still works and can be closed."""
    monkeypatch.setenv("FAKE_CUDA_BLIND", "1")
    monkeypatch.setattr(opening, "_PATIENCE_S", 0.6)
    monkeypatch.setattr(platform, "release", lambda: "6.6.87.2-microsoft-standard-WSL2")
    device = opened()
    begin = time.monotonic()
    with pytest.raises(MachineError, match=rf"{UNSEEN} .*round trip \d of 50, tried twice.*this is WSL2") as caught:
        ping_pong(device, host, 50)
    assert time.monotonic() - begin < 15 and "\n" not in str(caught.value)
    monkeypatch.delenv("FAKE_CUDA_BLIND")
    assert ping_pong(device, host, 50).rounds == 50


def test_a_machine_that_stands_still_is_tried_again(
    opened: Opened, host: HostLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, asked = host.ping_pong, []

    def stand_still_once(words: Any, rounds: int, patience_s: float) -> Any:
        asked.append(rounds)
        failed, _ = exchange(words, rounds, patience_s) if len(asked) == 1 else (0, None)
        return (3, None) if failed or len(asked) == 1 else (0, np.ones(rounds))

    monkeypatch.setattr(host, "ping_pong", stand_still_once)
    assert ping_pong(opened(), host, 20).p50_s == 1.0
    assert asked == [20, 20]


def test_words_that_arrive_after_their_flag_raise(opened: Opened, host: HostLibrary) -> None:
    device = opened("= pi_load_shared(sent + at) + (round == 7 && lane == 31);")
    with pytest.raises(MachineError, match=r"saw the GPU's flag before the words .*round trip 7 of 20"):
        ping_pong(device, host, 20)


def test_a_machine_is_checked_once(
    opened: Opened, fake_cuda: ctypes.CDLL, host: HostLibrary, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And again with another driver, and if it did not pass."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked: list[object] = []

    def ask(images: CudaImages = PING_PONG) -> None:
        before = fake_cuda.fake_count(b"cuGraphLaunch")
        device = opened(images=images)
        try:
            opening.check_once(device, host)
        except MachineError:
            asked.append("refused")
        else:
            asked.append(fake_cuda.fake_count(b"cuGraphLaunch") - before)
        device.close()

    monkeypatch.setenv("FAKE_CUDA_BLIND", "1")
    monkeypatch.setattr(opening, "_PATIENCE_S", 0.6)
    ask()
    monkeypatch.delenv("FAKE_CUDA_BLIND")
    ask(), ask()
    monkeypatch.setenv("FAKE_CUDA_VERSION", "12080")
    ask(), ask()
    ask(IMAGES)  # of an older compiler
    assert asked == ["refused", 1, 0, 1, 0, 0]
