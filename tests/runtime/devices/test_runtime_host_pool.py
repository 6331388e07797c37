"""host.c: the thread pool and the loop that runs a program."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from helpers.toys.toy_artifact import HERE, HOST_C, build_library
from picompile_runtime.devices.cpu.native import CallList, HostLibrary, seconds_of
from picompile_runtime.devices.memory import aligned_zeros
from picompile_runtime.errors import ArtifactError, KernelError, MachineError

MANY_THREADS = (1, 2, 3, 8, 2, 1, 8, 3)
TASKS_A_THREAD = 16  # host.c: PI_TASKS_A_THREAD


def tasks_of(threads: int) -> int:
    """The tasks of a region: one for a single thread, else several for each, so that none waits long for another."""
    return threads * TASKS_A_THREAD if threads > 1 else 1


@pytest.fixture
def host(library: Path) -> HostLibrary:
    return HostLibrary(library)


def test_every_element_is_done_once_by_several_tasks_a_thread(host: HostLibrary) -> None:
    for size in (1, 2, 7, 1000):
        out = aligned_zeros((size,), np.int32)
        calls = host.bind([("pool_fill", [out])] * 200)
        for threads in MANY_THREADS:
            out[:] = 0
            host.run(calls, threads)
            np.testing.assert_array_equal(out, 200 * (1000 + tasks_of(threads)))


def test_a_kernel_may_ask_for_fewer_tasks(host: HostLibrary) -> None:
    out, limit = aligned_zeros((100,), np.int32), aligned_zeros((1,), np.int32)
    calls = host.bind([("pool_fill_limited", [limit, out]), ("pool_fill", [out])] * 50)
    for threads in MANY_THREADS:
        for most in (0, 1, 2, 5, 300):
            limit[0], out[:] = most, 0
            host.run(calls, threads)
            expected = min(tasks_of(threads), most) if most else tasks_of(threads)
            np.testing.assert_array_equal(out, 50 * (2000 + expected + tasks_of(threads)))


@pytest.mark.parametrize("seconds", [0.3, pytest.param(5, marks=pytest.mark.slow("looks for races for seconds"))])
def test_each_region_sees_all_of_the_one_before_under_changing_threads_and_naps(
    host: HostLibrary, seconds: float
) -> None:
    """Regions that each need every result of the last; a lost or doubled task shows in the sums."""
    x, y = aligned_zeros((501,), np.int32), aligned_zeros((501,), np.int32)
    partial = aligned_zeros((256, 8), np.int64)
    start = np.random.default_rng(0).integers(0, 1000003, 501)
    calls = host.bind([("pool_sum", [x, partial, y]), ("pool_sum", [y, partial, x])] * 50)
    expected = start.astype(np.int64)
    for _ in range(100):
        expected = (expected + expected.sum()) % 1000003
    random, end, runs = np.random.default_rng(1), time.monotonic() + seconds, 0
    while time.monotonic() < end or runs <= 10:
        x[:] = start
        host.run(calls, int(random.choice(MANY_THREADS)))
        np.testing.assert_array_equal(x, expected)
        if runs % 5 == 0:
            time.sleep(float(random.choice([0.0, 0.0001, 0.002, 0.02])))
        runs += 1


def test_errors_name_the_call_and_the_reason(host: HostLibrary) -> None:
    out, stamps = aligned_zeros((10,), np.int32), np.zeros((3, 2), np.int64)
    says = {"fail": "^call 1, kernel fail: ValueError: this kernel always fails$", "pool_fail": "the last task failed"}
    for threads in MANY_THREADS:
        for kernel, text in says.items():
            calls = host.bind([("pool_fill", [out]), (kernel, []), ("pool_fill", [out])])
            out[:], stamps[:] = 0, -1
            with pytest.raises(KernelError, match=text):
                host.run(calls, threads, stamps)
            # What came before ran, what comes after did not, and the call that fails is the last that is stamped.
            np.testing.assert_array_equal(out, 1000 + tasks_of(threads))
            assert (stamps[:2] > 0).all() and (stamps[2] == -1).all()


def test_calls_that_cannot_be_made_raise(host: HostLibrary, tmp_path: Path) -> None:
    for name in ("nothing", "", "a\0b"):
        with pytest.raises(ArtifactError, match="has no kernel called"):
            host.bind([(name, [])])
    for array in (np.zeros((4, 4), np.int32)[:, :2], np.zeros(3, bool), np.zeros(3, complex)):
        with pytest.raises(ValueError, match="cannot take"):
            host.bind([("pool_fill", [array])])
    (tmp_path / "host.so").write_bytes(b"not a library")
    with pytest.raises(ArtifactError, match="cannot be loaded"):
        HostLibrary(tmp_path / "host.so")


def test_a_file_system_without_execution_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader says only that a segment cannot be mapped."""
    (tmp_path / "host.so").write_bytes(b"a library")
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_RDONLY))
    with pytest.raises(MachineError, match=r"host\.so: cannot be run: .* mounted with noexec, .*; copy the artifact"):
        HostLibrary(tmp_path / "host.so")


def test_each_call_is_stamped(host: HostLibrary) -> None:
    out = aligned_zeros((10,), np.int32)
    stamps = np.full((3, 2), -1, np.int64)
    calls = host.bind([("pool_fill", [out])] * 3)
    before = time.monotonic_ns()
    host.run(calls, 2, stamps)
    after = time.monotonic_ns()
    in_order = [before, *stamps.reshape(-1).tolist(), after]
    assert in_order == sorted(in_order)
    np.testing.assert_array_equal(seconds_of(stamps), [1e-9 * (end - begin) for begin, end in stamps.tolist()])
    assert (seconds_of(stamps) > 0).all()
    for wrong in (np.zeros((3, 2)), np.zeros((2, 2), np.int64), np.zeros((3,), np.int64)):
        with pytest.raises(ValueError, match=r"stamps must be int64 \[3, 2\]"):
            host.run(calls, 2, wrong)
    with pytest.raises(ValueError, match="contiguous"):
        host.run(calls, 2, np.zeros((2, 3), np.int64).T)


# ---- workers while waits for another device are to come: see toy_pool.c ----

_WATCHED = ("syscall=watched_syscall", "sched_yield=watched_yield", "pthread_create=watched_create")
_FOR_EVER_NS = 10**15


def build_watched(path: Path, alert_ns: int, taken_ns: int) -> Path:
    limits = f"PI_ALERT_NS={alert_ns}", f"PI_TAKEN_NS={taken_ns}"
    return build_library(path, *_WATCHED, *limits, also=[HERE / "toy_pool.c"])


@pytest.fixture(scope="module")
def watched_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Workers of this one stay awake however long a wait takes and whoever takes their core."""
    path = tmp_path_factory.mktemp("watched") / "host.so"
    return build_watched(path, alert_ns=_FOR_EVER_NS, taken_ns=_FOR_EVER_NS)


class Watched:
    """Lists of calls, by names of kernels, with one worker."""

    def __init__(self, library: Path) -> None:
        self.host = HostLibrary(library)
        self.out, self.one = aligned_zeros((10,), np.int32), aligned_zeros((1,), np.int32)
        self.one[:] = 1

    def bind(self, *kernels: str, waits: Sequence[str] = ()) -> CallList:
        arguments = {"pool_fill": [self.out], "pool_fill_limited": [self.one, self.out], "pool_await_sleep": [self.one]}
        calls = [(kernel, arguments.get(kernel, [])) for kernel in kernels]
        return self.host.bind(calls, waits=waits)

    def run(self, *kernels: str, waits: Sequence[str] = (), threads: int = 2) -> None:
        self.host.run(self.bind(*kernels, waits=waits), threads)


@pytest.fixture
def watched(watched_library: Path) -> Watched:
    return Watched(watched_library)


@pytest.mark.parametrize("last", ["pool_fill_limited", "pool_await_yields"])
def test_workers_do_not_sleep_until_the_last_wait_is_over(last: str, watched: Watched) -> None:
    before = ("pool_fill", "pool_await_yields") * 2
    for _ in range(3):
        watched.run(*before, last, "pool_await_sleep", "pool_fill", "pool_await_sleep", waits=[last])
        watched.run("pool_fill", "pool_await_sleep")


@pytest.mark.parametrize(("alert_ns", "taken_ns"), [(1000000, _FOR_EVER_NS), (_FOR_EVER_NS, -1)])
def test_workers_sleep_in_a_wait_that_takes_long(alert_ns: int, taken_ns: int, tmp_path: Path) -> None:
    """And where others take their core: there every yield is taken for one in which that happened."""
    library = build_watched(tmp_path / "host.so", alert_ns, taken_ns)
    Watched(library).run(*("pool_fill", "pool_await_sleep") * 3, waits=["pool_await_sleep"])


def test_workers_that_a_run_does_not_use_sleep(watched_library: Path, tmp_path: Path) -> None:
    """With a copy of the library: in others' tests there is one worker."""
    path = tmp_path / "host.so"
    path.write_bytes(watched_library.read_bytes())
    watched = Watched(path)
    with_three = watched.bind("pool_fill")
    with_two = watched.bind("pool_await_sleep", waits=["pool_await_sleep"])
    for _ in range(20):
        watched.host.run(with_three, 3)
        watched.host.run(with_two, 2)  # soon enough to find the third thread awake


def test_workers_sleep_after_a_failure(watched: Watched) -> None:
    with pytest.raises(KernelError, match="call 1, kernel fail"):
        watched.run("pool_await_yields", "fail", "pool_fill", waits=["pool_fill"])
    watched.run("pool_await_sleep")


def test_workers_sleep_after_threads_could_not_be_started(watched: Watched) -> None:
    watched.run("pool_fill")
    refuses = ctypes.c_int.in_dll(watched.host._library, "pool_refuses_threads")
    refuses.value = 1
    with pytest.raises(KernelError, match="cannot start thread 3 of 3"):
        watched.run("pool_fill", waits=["pool_fill"], threads=3)
    refuses.value = 0
    watched.run("pool_await_sleep")


def test_workers_of_a_forked_process_sleep(watched_library: Path) -> None:
    """The fork is made while another thread is amid a program with waits to come, which the child knows nothing of."""
    script = f"""
import os, sys, threading, time, warnings
import numpy as np
from picompile_runtime.devices.memory import aligned_zeros
from picompile_runtime.devices.cpu.native import HostLibrary
warnings.simplefilter("ignore")
host = HostLibrary({str(watched_library)!r})
out, state, one = (aligned_zeros((1,), np.int32) for _ in range(3))
one[:] = 1
waiting = host.bind([("pool_fill", [out]), ("pool_await_yields", []), ("pool_hold", [state])], waits=["pool_hold"])
sleeping = host.bind([("pool_fill", [out]), ("pool_await_sleep", [one])])
thread = threading.Thread(target=host.run, args=(waiting, 2))
thread.start()
while state[0] != 1:
    time.sleep(0.001)
child = os.fork()
if child == 0:  # without HostLibrary.run, whose lock the other thread had
    os._exit(0 if host._run(sleeping.calls, len(sleeping), 2, None) == -1 else 1)
right = os.waitpid(child, 0)[1] == 0
state[0] = 2
thread.join()
sys.exit(0 if right else 1)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


# ---- idle workers ----


def test_idle_workers_use_no_processor_time(host: HostLibrary) -> None:
    host.run(host.bind([("pool_fill", [aligned_zeros((10,), np.int32)])] * 10), 8)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


def test_waiting_for_a_worker_uses_no_processor_time(host: HostLibrary) -> None:
    """A worker may have lost its core; the thread that waits for it must leave its own to it."""
    calls = host.bind([("pool_nap", [])])
    before, start = time.process_time(), time.monotonic()
    host.run(calls, 2)
    assert time.monotonic() - start > 0.29
    assert time.process_time() - before < 0.15


def test_a_new_library_at_a_known_path_is_the_new_one(library: Path, tmp_path: Path) -> None:
    """The loader by itself would return the old one: it compares names."""
    path, new = tmp_path / "host.so", tmp_path / "new.so"
    path.write_bytes(library.read_bytes())
    HostLibrary(path).kernel("pool_fill")
    code = "".join(f"int {name}(void) {{ return 0; }}" for name in ("__tvm_ffi_other", "pi_run", "pi_last_error"))
    subprocess.run(["gcc", "-shared", "-fPIC", "-xc", "-", "-o", new], input=code, text=True, check=True)
    os.replace(new, path)
    replaced = HostLibrary(path)
    assert replaced.kernel("other")
    with pytest.raises(ArtifactError):
        replaced.kernel("pool_fill")


@pytest.mark.slow("compiles a program")
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_the_pool_under_a_sanitizer(sanitizer: str, tmp_path: Path) -> None:
    program = tmp_path / "driver"
    flags = ["-O1", "-g", "-std=gnu11", "-Wall", "-Wextra", "-Werror", f"-fsanitize={sanitizer}"]
    sources = [str(HERE / "pool_driver.c"), str(HOST_C)]
    build = subprocess.run(["gcc", *flags, "-o", str(program), *sources, "-lpthread"], capture_output=True, text=True)
    if build.returncode and "fsanitize" not in build.stderr and "-ltsan" not in build.stderr:
        pytest.fail(build.stderr)
    if build.returncode:
        pytest.skip(f"gcc cannot build with -fsanitize={sanitizer} here")
    # The child of a fork starts threads of its own, which ThreadSanitizer allows only if told so.
    environment = {**os.environ, "TSAN_OPTIONS": "die_after_fork=0"}
    run = subprocess.run([str(program), "2"], capture_output=True, text=True, timeout=120, env=environment)
    if "unexpected memory mapping" in run.stderr:
        pytest.skip(f"the sanitizer {sanitizer} does not run on this kernel")
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout == "right\n"
