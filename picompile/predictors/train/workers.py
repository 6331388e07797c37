"""Training layers as jobs: in worker processes of this machine, or on a Ray cluster."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from picompile.errors import PicompileError, UsageError
from picompile.predictors.train.candidates import LayerResult, fit_layer, load_result, run_job, save_result
from picompile.predictors.train.data import LayerData, save_layer_data
from picompile.predictors.train.fit import JobSettings

# Training layers in worker processes of this machine.


# Memory of all jobs together unless --jobs sets their number: with the parent process they stay below 6 GB.
_MOST_BYTES = 5 << 30

# Memory of a process before it has any data: Python and torch.
_PROCESS_BYTES = 400 << 20

# `end_with_parent` comes first, because the worker imports torch, which takes seconds.
_WORKER = (
    "from picompile.processes import end_with_parent; end_with_parent({parent}); "
    "from picompile.predictors.train.worker import main; main()"
)

Prepare = Callable[[int], tuple[LayerData, JobSettings]]


def train_locally(
    layers: list[int], prepare: Prepare, layer_file: Callable[[int], Path], jobs: int
) -> Iterator[LayerResult]:
    """Train `layers`, at most `jobs` at a time; yield results as they come, already written to `layer_file(layer)`.

    `prepare` gathers a layer's data in this process, when a worker is free for it. If `jobs` is 1, training runs in
    this process too; the bytes are the same.
    """

    def hand_over(layer: int) -> tuple[Path, Path, JobSettings]:
        data, settings = prepare(layer)
        path = layer_file(layer).with_suffix(".data")
        save_layer_data(path, data)
        return path, layer_file(layer), settings

    with nullcontext(_run_here) if jobs == 1 else _workers(min(jobs, len(layers))) as submit:
        for layer, done in _as_completed(layers, jobs, lambda layer: submit(*hand_over(layer))):
            done.result()
            layer_file(layer).with_suffix(".data").unlink()
            yield load_result(layer_file(layer))


def _as_completed(
    layers: Sequence[int], most: int, submit: Callable[[int], "Future[Any]"]
) -> "Iterator[tuple[int, Future[Any]]]":
    """Submit a job for each layer, at most `most` at a time; yield the layers and their jobs as they end."""
    waiting, running = list(layers), dict[Future[Any], int]()
    while waiting or running:
        while waiting and len(running) < most:
            layer = waiting.pop(0)
            running[submit(layer)] = layer
        for done in wait(running, return_when=FIRST_COMPLETED).done:
            yield running.pop(done), done


def _run_here(data: Path, result: Path, settings: JobSettings) -> "Future[None]":
    run_job(data, result, settings)
    done = Future[None]()
    done.set_result(None)
    return done


@contextmanager
def _workers(count: int) -> Iterator[Callable[[Path, Path, JobSettings], "Future[None]"]]:
    """Start `count` worker processes, each with a thread here that waits for it; they end with the block."""
    with ExitStack() as stack:
        free: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
        processes = [stack.enter_context(_start()) for _ in range(count)]
        pool = stack.enter_context(ThreadPoolExecutor(count))
        for process in processes:
            # Called before the pool waits for its threads, because those wait for the processes.
            stack.callback(process.kill)
            free.put(process)

        def run(data: Path, result: Path, settings: JobSettings) -> None:
            process = free.get()
            try:
                _ask(process, data, result, settings)
            finally:
                free.put(process)

        yield lambda data, result, settings: pool.submit(run, data, result, settings)


def _start() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", _WORKER.format(parent=os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )


def _ask(process: "subprocess.Popen[str]", data: Path, result: Path, settings: JobSettings) -> None:
    job = {"data": str(data), "result": str(result), "settings": asdict(settings)}
    answer = ""
    try:
        if process.stdin is not None and process.stdout is not None:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
    except BrokenPipeError:
        answer = ""
    if not answer:
        raise PicompileError(
            f"a worker that trained {result.stem} ended with {process.wait()}; if memory was short, use fewer --jobs"
        )
    if error := json.loads(answer).get("error"):
        raise PicompileError(f"training of layer {int(result.stem)} failed: {error}")


def count_jobs(asked: int | None, layers: int, job_bytes: int) -> int:
    """Return how many layers to train at a time: `asked`, or one per core as far as memory allows.

    The memory is what is available, but at most 5 GiB: more is used only if `asked` says so.
    """
    if asked is not None:
        return max(1, min(asked, layers))
    cores = len(os.sched_getaffinity(0))
    fitting = int(min(_available_bytes(), _MOST_BYTES) // (job_bytes + _PROCESS_BYTES))
    return max(1, min(cores, layers, fitting))


def _available_bytes() -> float:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    except OSError:
        pass
    return float("inf")


# Training layers on a Ray cluster: the same job as in a worker process, as a remote task.


# Tasks submitted beyond those that the cluster can run at once, so that none of its cores waits.
_TASKS_AHEAD = 1


def require_ray() -> Any:
    """Return the ray module. Raise `UsageError` if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise UsageError("--ray needs ray: pip install 'picompile[ray]'") from error
    return ray


def train_on_cluster(
    layers: list[int], prepare: Prepare, layer_file: Callable[[int], Path], address: str, device: str
) -> Iterator[LayerResult]:
    """Train `layers` on the cluster at `address`; `local` starts one on this machine and ends it afterwards.

    Data and results are sent over the network; the machines need this version of picompile, but no shared folder.
    """
    ray = require_ray()
    with _connected(ray, address):
        remote = ray.remote(num_cpus=1, num_gpus=1 if device == "cuda" else 0)(_job)
        most = int(ray.cluster_resources().get("CPU", 1)) + _TASKS_AHEAD
        for layer, done in _as_completed(layers, most, lambda layer: remote.remote(*prepare(layer)).future()):
            save_result(layer_file(layer), done.result())
            yield load_result(layer_file(layer))


def _job(data: LayerData, settings: JobSettings) -> LayerResult:
    torch.set_num_threads(1)
    return fit_layer(data, settings)


@contextmanager
def _connected(ray: Any, address: str) -> Iterator[None]:
    try:
        if address == "local":
            # The loopback address is enough on one machine, and not every network lets another one be reached.
            ray.init(
                address="local",
                _node_ip_address="127.0.0.1",
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                # Ray gives its workers a low priority; beside other work they would need minutes just to import torch.
                _system_config={"worker_niceness": 0},
            )
        else:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise UsageError(f"--ray {address}: no cluster: {' '.join(str(error).split())}") from error
    try:
        yield
    finally:
        ray.shutdown()
