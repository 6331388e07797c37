"""Runs a llama-bench that somebody has built, with as many layers on the GPU as dense layer offloading has there.

These are counted for picompile's kernels (`split.py`). llama.cpp takes more than that: buffers for what it computes,
and what CUDA and cuBLAS take for themselves. So the rule favours llama.cpp, and a row has what the GPU's memory was
found to hold, where nvidia-smi tells. llama.cpp counts the head as one layer, the first to go to the GPU.

Layers that do not fit are computed by the CPU. There are two ways to hold their weights:

| way | weights of the other layers | prompts |
| --- | --- | --- |
| `pinned` | as in the file, in memory that the GPU reads quickly | of 32 tokens and more: copied to the GPU |
| `repacked` | in the layout that the CPU's kernels want | computed by the CPU; not measured, since it takes minutes |

The results are rows of benchmarks.gpu's list of models. What is missing is a row with a reason.
"""

import os
import signal
import site
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.outputs import llama_bench_rows

Result = dict[str, Any]
TOKENS, _REPEATS = 32, 2
_END_S = 10.0
# Whoever runs this may be killed; then the system ends llama-bench too (PR_SET_PDEATHSIG), which would keep the GPU.
_ENDS_WITH_US = (
    sys.executable,
    "-c",
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])",
)
# Asking more often would disturb what is measured.
_MEMORY_EVERY_S = 5.0
_KEPT = (
    *("n_threads", "n_prompt", "n_gen", "n_gpu_layers", "avg_ts", "stddev_ts", "samples_ts", "backends"),
    *("gpu_info", "cpu_info", "build_commit", "flash_attn"),
)


@dataclass(frozen=True)
class Way:
    """A way to hold weights, the length of the prompt that is read so, and further options of llama-bench."""

    name: str
    prompt: int
    options: Sequence[str] = ()


WAYS = (Way("pinned", 512), Way("repacked", 0, ("--no-host", "1")))


@dataclass(frozen=True)
class BenchedModel:
    """The program, its model's file and name, and with how many layers on the GPU and threads it runs."""

    program: Path
    file: Path
    name: str
    layers: int
    threads: int

    def command(self, way: Way) -> list[str]:
        """Return the command. It prints one row a line as soon as it is known."""
        numbers = {"-ngl": self.layers + 1, "-p": way.prompt, "-n": TOKENS, "-t": self.threads, "-r": _REPEATS}
        counts = [text for key, value in numbers.items() for text in (key, str(value))]
        # No mmap: pages of a file are not pinned.
        return [str(self.program), "-m", str(self.file), *counts, "-o", "jsonl", "-lm", "none", *way.options]


@dataclass
class _Ended:
    """The end of a program says why it has no more rows, and the most of the GPU's memory that it was found to hold."""

    reason: str | None = None
    taken_bytes: int | None = None


def bench(model: BenchedModel, way: Way, limit_s: float) -> Iterator[Result]:
    """Yield rows as they come, and then one with a reason for each test that the program did not come to."""
    tests = {(way.prompt, 0): f"pp{way.prompt}", (0, TOKENS): f"tg{TOKENS}"}
    if not way.prompt:
        del tests[0, 0]
    variant, ended = f"llama.cpp {way.name}", _Ended()
    where = f"{model.name} q4_0, {variant}, {model.layers} layers on the GPU, {model.threads} threads"
    # Its tokens are compared with nothing.
    facts = {"variant": variant, "is_right": None}
    for found in _rows(model.command(way), limit_s, ended):
        test = tests.pop((found["n_prompt"], found["n_gen"]), f"{found['n_prompt']} and {found['n_gen']}")
        row = {"label": f"{where}, {test}", **facts, **{key: found.get(key) for key in _KEPT}, **_speed(found)}
        yield row if ended.taken_bytes is None else {**row, "taken_bytes": ended.taken_bytes}
    for test in tests.values():
        yield {"label": f"{where}, {test}", **facts, "reason": ended.reason or "llama-bench has no such row"}


def _speed(found: Result) -> Result:
    """Return the median of a row. A library of CUDA that does not load is no error to llama.cpp: the CPU computes."""
    if not found.get("gpu_info"):
        return {"reason": f"llama.cpp found no GPU: {found.get('backends')}"}
    median = statistics.median(found.get("samples_ts") or [found["avg_ts"]])
    return {"prompts": {str(found["n_prompt"]): median}} if found["n_gen"] == 0 else {"tokens_per_s": median}


def _rows(command: Sequence[str], limit_s: float, ended: _Ended) -> Iterator[Result]:
    """Yield the rows that a program prints, as they come; `ended` then says how it ended, whatever happened."""
    folders = [os.path.dirname(command[0]), *_cuda_folders(), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    environment, end_s = {**os.environ, "LD_LIBRARY_PATH": ":".join(folders)}, time.monotonic() + limit_s
    before = _memory_bytes()
    with (
        tempfile.TemporaryFile("w+") as err,
        subprocess.Popen(
            [*_ENDS_WITH_US, *command], stdout=subprocess.PIPE, stderr=err, env=environment, text=True,
            start_new_session=True,
        ) as process,
    ):  # fmt: skip
        threading.Thread(target=_watch, args=(process, end_s, before, ended), daemon=True).start()
        try:
            for line in process.stdout or ():
                yield from llama_bench_rows(line)
            code = process.wait()
        finally:
            _end(process)
        ended.reason = f"ended after {limit_s:.0f} s" if time.monotonic() >= end_s else _reason(code, err)


def _watch(process: "subprocess.Popen[str]", end_s: float, before: int | None, ended: _Ended) -> None:
    """Note now and then what the GPU's memory holds, and end the process when its time is over."""
    while (left_s := end_s - time.monotonic()) > 0:
        with suppress(subprocess.TimeoutExpired):
            process.wait(min(_MEMORY_EVERY_S, left_s))
            return
        now = _memory_bytes()
        if now is not None and before is not None:
            ended.taken_bytes = max(ended.taken_bytes or 0, now - before)
    _end(process)


def _end(process: "subprocess.Popen[str]") -> None:
    """Ends the process with all that it has started."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _memory_bytes() -> int | None:
    """Return the bytes that the first GPU's memory holds; None where nobody tells."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_END_S).stdout
        return int(text.split()[0]) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _cuda_folders() -> Iterator[str]:
    """Yield the folders in which Python packages, such as PyTorch's, have libraries of CUDA."""
    for packages in dict.fromkeys([*site.getsitepackages(), *sys.path]):
        yield from map(str, Path(packages, "nvidia").glob("*/lib"))


def _reason(code: int, err: Any) -> str | None:
    """Why a program failed: the first line about an error, or its last one; None where it did not fail."""
    if code == 0:
        return None
    err.seek(0)
    lines = [line.strip() for line in err.read().splitlines() if line.strip()]
    said = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "")
    return f"ended with {code}" + (f": {said}" if said else "")
