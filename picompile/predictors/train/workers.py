"""Training layers as jobs, in worker processes of this machine."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue

from picompile.errors import PicompileError
from picompile.predictors.train.candidates import LayerResult, load_result, run_job
from picompile.predictors.train.data import LayerData, save_layer_data
from picompile.predictors.train.fit import JobSettings

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
        waiting, running = list(layers), dict[Future[None], int]()
        while waiting or running:
            while waiting and len(running) < jobs:
                layer = waiting.pop(0)
                running[submit(*hand_over(layer))] = layer
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                layer = running.pop(done)
                done.result()
                layer_file(layer).with_suffix(".data").unlink()
                yield load_result(layer_file(layer))


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
