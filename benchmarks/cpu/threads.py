"""The cost of threads, and the speed of decoding when another process takes a core.

    python -m benchmarks.cpu.threads ARTIFACT [--threads 2 1] [--rounds 9] [--tokens 24]

Prints two Markdown tables: the time that a parallel region takes beyond a loop of the same work, and tokens a second of
an artifact, alone and beside a process that keeps one core busy, in turns. A busy process that does nothing but count
takes no memory bandwidth: what it costs is the core.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil

import picompile_runtime
from benchmarks.script import argument_parser, heading, row
from picompile_codegen.build.host_library import build_host_library
from picompile_codegen.cpu.kernel import Kernel, KernelFunction
from picompile_codegen.cpu.tensor import loop, parallel
from picompile_runtime.devices.cpu.native import HostLibrary
from picompile_runtime.devices.memory import aligned_zeros
from picompile_runtime.engine.engine import Engine

_ROWS, _COLUMNS = 64, 64
_REGIONS = 200


def _arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__, "artifact", threads=[2, 1], rounds=9, prompt=128)
    parser.add_argument("--tokens", type=int, default=24, help="decoded in each turn")
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)), help="the one that is taken")
    return parser.parse_args()


def _adding(in_region: bool) -> Kernel:
    """y[i, j] += x[j]: about 50 ns of work for each i, in a parallel region or in a plain loop."""
    function = KernelFunction("add_parallel" if in_region else "add_serial")
    with function:
        x, y = function.floats("x", _COLUMNS), function.floats("y", _ROWS, _COLUMNS)
        with parallel(_ROWS, when_worth=in_region) as i, loop(0, _COLUMNS) as j:
            y[i, j] = y[i, j] + x[j]
    return function.kernel()


def _seconds_a_call(library: HostLibrary, kernel: Kernel, threads: int, runs: int) -> list[float]:
    arrays = [aligned_zeros(argument.shape, np.dtype(argument.dtype)) for argument in kernel.arguments]
    calls = library.bind([(kernel.name, arrays)] * _REGIONS)
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        library.run(calls, threads)
        seconds.append((time.perf_counter() - start) / _REGIONS)
    return seconds


def _print_region_cost(thread_counts: list[int]) -> None:
    parallel_kernel, serial_kernel = _adding(True), _adding(False)
    with tempfile.TemporaryDirectory() as folder:
        build_host_library([parallel_kernel, serial_kernel], Path(folder) / "host.so")
        library = HostLibrary(Path(folder) / "host.so")
    work = min(_seconds_a_call(library, serial_kernel, 1, 200))
    print(heading("threads", "a region beyond its work, least, ns", "median, ns"))
    for threads in thread_counts:
        seconds = [second - work / threads for second in _seconds_a_call(library, parallel_kernel, threads, 500)]
        print(row(threads, f"{1e9 * min(seconds):.0f}", f"{1e9 * statistics.median(seconds):.0f}"))


@contextmanager
def _busy(core: int) -> Iterator[psutil.Process]:
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-S", "-c", code])
    try:
        time.sleep(0.1)
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def _decode_speed(engine: Engine, text: list[int], prompt: int) -> float:
    """Tokens a second behind the first `prompt` tokens of `text`, which have been read."""
    engine.rewind(prompt)
    start = time.perf_counter()
    for token in text[prompt:]:
        engine.decode(token)
    return (len(text) - prompt) / (time.perf_counter() - start)


def _print_decoding(options: argparse.Namespace) -> None:
    engines = {threads: picompile_runtime.load(options.artifact, threads=threads) for threads in options.threads}
    speeds: dict[tuple[int, bool], list[float]] = {}
    taken: dict[int, list[float]] = {threads: [] for threads in options.threads}
    count = options.prompt + options.tokens
    for engine in engines.values():
        text = np.random.default_rng(0).integers(0, engine.vocab, count).tolist()
        engine.prefill(text[: options.prompt])
    for _ in range(options.rounds):
        for threads, engine in engines.items():
            speeds.setdefault((threads, False), []).append(_decode_speed(engine, text, options.prompt))
            with _busy(options.core) as process:
                start, before = time.perf_counter(), process.cpu_times().user
                speeds.setdefault((threads, True), []).append(_decode_speed(engine, text, options.prompt))
                taken[threads].append((process.cpu_times().user - before) / (time.perf_counter() - start))
    print()
    print(heading("threads", "tokens/s", "one core taken", "of quiet", "of its core, the other process had"))
    for threads in options.threads:
        quiet, busy = (statistics.median(speeds[threads, is_busy]) for is_busy in (False, True))
        share = statistics.median(taken[threads])
        print(row(threads, f"{quiet:.1f}", f"{busy:.1f}", f"{busy / quiet:.0%}", f"{share:.0%}"))
    print(f"\nMedians of {options.rounds} interleaved rounds of {options.tokens} tokens behind {options.prompt}.")


def main() -> None:
    options = _arguments()
    _print_region_cost(options.threads)
    _print_decoding(options)


if __name__ == "__main__":
    main()
