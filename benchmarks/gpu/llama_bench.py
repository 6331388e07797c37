"""Runs a llama-bench that somebody has built: llama.cpp with as many layers on the GPU as a budget holds.

The layers are counted as for picompile's dense layer offloading (`models.py`): of the budget 5 % stay free, the
head comes first, and a layer needs its matrices and its keys and values for `context` tokens. llama.cpp takes more than
that: buffers for what it computes, the longer cache of longer prompts, and what CUDA and cuBLAS take for themselves. So
the rule favours llama.cpp, and a row has what the GPU's memory was found to hold, where nvidia-smi tells.

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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.outputs import llama_bench_rows

Result = dict[str, Any]
WAYS: Mapping[str, Sequence[str]] = {"pinned": (), "repacked": ("--no-host", "1")}
_WITH_PROMPTS = "pinned"
# As picompile's: q4_0 and q4 have the same bytes.
_SPARED_SHARE, _QUANT = 0.05, "q4"
_POLL_S, _END_S = 0.5, 10.0
# Whoever runs this may be killed; then the system ends llama-bench too (PR_SET_PDEATHSIG), which would keep the GPU.
_ENDS_WITH_US = (
    sys.executable,
    "-c",
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])",
)
# Asking more often would disturb what is measured.
_MEMORY_EVERY_S = 5.0


@dataclass(frozen=True)
class BenchOptions:
    """Options of llama-bench: prompts and decoded tokens of these lengths, with each number of threads."""

    budget_bytes: int
    prompts: Sequence[int] = (64, 512, 1536)
    tokens: int = 128
    threads: Sequence[int] = (16, 8)
    repeats: int = 2
    context: int = 512
    limit_s: float = 240.0
    ways: Sequence[str] = tuple(WAYS)

    def prompts_of(self, way: str) -> Sequence[int]:
        """The prompts that are measured in this way; llama-bench takes 0 for none."""
        return self.prompts if way == _WITH_PROMPTS else (0,)


@dataclass
class _Run:
    """One llama-bench and what it wrote."""

    command: list[str]
    limit_s: float
    rows: list[Result] = field(default_factory=list)
    taken_bytes: int | None = None
    reason: str | None = None


def layers_that_fit(facts: Mapping[str, Any], budget_bytes: int, context: int) -> int | None:
    """Return how many layers the GPU holds beside the head; None where the head does not fit."""
    left = int((1 - _SPARED_SHARE) * budget_bytes) - facts["head_bytes"]
    if left < 0:
        return None
    return int(min(left // (facts["layer_bytes"] + context * facts["cache_bytes"]), facts["layers"]))


def gpu_layers(facts: Mapping[str, Any], budget_bytes: int, context: int) -> int:
    """Return the layers for -ngl: llama.cpp counts the head as one, the first to go to the GPU."""
    layers = layers_that_fit(facts, budget_bytes, context)
    return 0 if layers is None else layers + 1


def bench(program: Path, model: Path, facts: Mapping[str, Any], options: BenchOptions) -> Iterator[list[Result]]:
    """All rows, again and again, more of them known each time."""
    done: list[Result] = []
    for way in options.ways:
        run = _Run(_command(program, model, facts, options, way), options.limit_s)
        for _ in _measure(run):
            yield done + [_measured(row, way, facts, options, run) for row in run.rows]
        done += [_measured(row, way, facts, options, run) for row in run.rows]
        done += _missing(run, way, facts, options)
        yield done


def _command(program: Path, model: Path, facts: Mapping[str, Any], options: BenchOptions, way: str) -> list[str]:
    numbers = {
        "-ngl": [gpu_layers(facts, options.budget_bytes, options.context)], "-p": options.prompts_of(way),
        "-n": [options.tokens], "-t": options.threads, "-r": [options.repeats],
    }  # fmt: skip
    counts = [text for key, values in numbers.items() for text in (key, ",".join(map(str, values)))]
    # One row a line as soon as it is known, and no mmap: pages of a file are not pinned.
    return [str(program), "-m", str(model), *counts, "-o", "jsonl", "-lm", "none", *WAYS[way]]


def _measure(run: _Run) -> Iterator[None]:
    """Fills `run`; yields at each new row. Whatever happens to the program, `run` says it."""
    folders = [os.path.dirname(run.command[0]), *_cuda_folders(), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(folders)}
    before = _memory_bytes()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            command = [*_ENDS_WITH_US, *run.command]
            process = subprocess.Popen(command, stdout=out, stderr=err, env=environment, start_new_session=True)
        except OSError as error:
            run.reason = f"{run.command[0]}: {error.strerror}"
            return
        try:
            for _ in _ends(process, time.monotonic() + run.limit_s, _watch(run, before)):
                known = len(run.rows)
                run.rows = _parsed(out)
                if len(run.rows) > known:
                    yield
        finally:
            is_late = process.poll() is None
            _end(process)
        run.rows = _parsed(out)
        run.reason = f"ended after {run.limit_s:.0f} s" if is_late else _reason(process.returncode, err)


def _ends(process: subprocess.Popen[Any], deadline_s: float, watch: Callable[[], None]) -> Iterator[None]:
    """Yields now and then until the process has ended, or the time is over."""
    next_s = time.monotonic() + _MEMORY_EVERY_S
    while time.monotonic() < deadline_s:
        try:
            process.wait(min(_POLL_S, max(0.0, deadline_s - time.monotonic())))
            return
        except subprocess.TimeoutExpired:
            yield
        if time.monotonic() > next_s:
            watch()
            next_s = time.monotonic() + _MEMORY_EVERY_S


def _end(process: subprocess.Popen[Any]) -> None:
    """Ends the process with all that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_END_S)


def _watch(run: _Run, before: int | None) -> Callable[[], None]:
    def watch() -> None:
        now = _memory_bytes()
        if now is not None and before is not None:
            run.taken_bytes = max(run.taken_bytes or 0, now - before)

    return watch


def _memory_bytes() -> int | None:
    """Return the bytes that the first GPU's memory holds; None where nobody tells."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_END_S).stdout
        return int(text.split()[0]) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _parsed(out: Any) -> list[Result]:
    """The rows that are whole."""
    out.seek(0)
    return llama_bench_rows(out.read())


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


def _facts(way: str, facts: Mapping[str, Any], options: BenchOptions) -> Result:
    layers = layers_that_fit(facts, options.budget_bytes, options.context)
    return {
        "model": facts["name"], "quant": _QUANT, "variant": f"llama.cpp {way}", "hot": 0,
        "budget": options.budget_bytes / facts["dense_bytes"], "dense_bytes": facts["dense_bytes"],
        # Its tokens are compared with nothing.
        "resident_layers": layers or 0, "is_right": None,
    }  # fmt: skip


def _label(facts: Result, test: str, threads: int) -> str:
    return (
        f"{facts['model']} q4_0, {facts['variant']}, {facts['resident_layers']} layers on the GPU, "
        f"{threads} threads, {test}"
    )


def _measured(found: Result, way: str, facts: Mapping[str, Any], options: BenchOptions, run: _Run) -> Result:
    """A row of llama-bench as one of benchmarks.gpu's."""
    of_row, is_prompt = _facts(way, facts, options), found["n_gen"] == 0
    test = f"pp{found['n_prompt']}" if is_prompt else f"tg{found['n_gen']}"
    samples = found.get("samples_ts") or [found["avg_ts"]]
    kept = ("n_threads", "n_prompt", "n_gen", "n_gpu_layers", "avg_ts", "stddev_ts", "samples_ts", "backends")
    median = statistics.median(samples)
    speed = {"prompts": {str(found["n_prompt"]): median}} if is_prompt else {"tokens_per_s": median}
    # A library of CUDA that does not load is no error to llama.cpp: it then computes everything on the CPU.
    is_asked = gpu_layers(facts, options.budget_bytes, options.context) > 0
    without = {"reason": f"llama.cpp found no GPU: {found.get('backends')}"}
    row = {
        "label": _label(of_row, test, found["n_threads"]), **of_row,
        **(without if is_asked and not found.get("gpu_info") else speed),
        **{key: found.get(key) for key in (*kept, "gpu_info", "cpu_info", "build_commit", "flash_attn")},
    }  # fmt: skip
    return row if run.taken_bytes is None else {**row, "taken_bytes": run.taken_bytes}


def _missing(run: _Run, way: str, facts: Mapping[str, Any], options: BenchOptions) -> Iterator[Result]:
    """A row for each test that the program did not come to."""
    known = {(row["n_threads"], row["n_prompt"], row["n_gen"]) for row in run.rows}
    tests = [(count, 0, f"pp{count}") for count in options.prompts_of(way) if count]
    tests += [(0, options.tokens, f"tg{options.tokens}")] if options.tokens else []
    of_row = _facts(way, facts, options)
    for threads in options.threads:
        for prompt, tokens, test in tests:
            if (threads, prompt, tokens) not in known:
                reason = run.reason or "llama-bench has no such row"
                yield {"label": _label(of_row, test, threads), **of_row, "reason": reason}
