"""Helpers of the benchmarks: they run picompile as a user does, and watch a process's memory."""

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from picompile.synth.shapes import SHAPES


def picompile(*arguments: object) -> str:
    """Runs the command line; returns its standard output. Stops the benchmark when it fails."""
    command = [sys.executable, "-m", "picompile", *map(str, arguments)]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if finished.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {finished.returncode}")
    return finished.stdout


def picompile_json(*arguments: object) -> dict[str, Any]:
    """Run picompile with `--json`, and return its output."""
    result: dict[str, Any] = json.loads(picompile(*arguments, "--json"))
    return result


def few_layers(shape: str, layers: int, work: Path) -> Path:
    """Return a checkpoint in `work` of the first `layers` layers of a shape, 10 % of whose neurons fire."""
    folder = work / f"{shape}-{layers}-layers"
    if not folder.exists():
        work.mkdir(parents=True, exist_ok=True)
        config = work / "config.json"
        config.write_text(json.dumps({**SHAPES[shape].config, "num_hidden_layers": layers}))
        picompile("synth", "--shape", config, "--active", 0.1, "-o", folder)
    return folder


def _descendants(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


def _memory(pid: int) -> dict[str, int]:
    """Anonymous and resident bytes of a process; none of one that has ended.

    From counters that the kernel keeps. `smaps_rollup` walks all pages: of a process of 3 GB that takes half of a core,
    and stops the process meanwhile.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = dict(line.split(":", 1) for line in lines if line.startswith(("RssAnon:", "VmRSS:")))
    return {name: int(value.split()[0]) * 1024 for name, value in fields.items()}


@dataclass(frozen=True)
class Watched:
    """How a process went. Bytes are peaks; `anonymous_bytes` leaves out mapped files."""

    seconds: float
    anonymous_bytes: int
    resident_bytes: int
    returncode: int


def watch(command: list[str], limit_bytes: int | None = None) -> Watched:
    """Runs a command and samples the memory of all its processes together, up to 50 times a second.

    Pages that several of them share, such as libraries, are counted in each.

    `limit_bytes` is set on the process with RLIMIT_AS, which counts every mapped byte, files and libraries included.
    """
    prefix = ["prlimit", f"--as={limit_bytes}"] if limit_bytes else []
    start = time.monotonic()
    process = subprocess.Popen([*prefix, *command], stdout=subprocess.DEVNULL)
    peaks = {"RssAnon": 0, "VmRSS": 0}

    def sample() -> None:
        while process.poll() is None:
            sums = dict.fromkeys(peaks, 0)
            for pid in [process.pid, *_descendants(process.pid)]:
                for name, size in _memory(pid).items():
                    sums[name] += size
            for name, size in sums.items():
                peaks[name] = max(peaks[name], size)
            time.sleep(0.02)

    thread = threading.Thread(target=sample)
    thread.start()
    returncode = process.wait()
    thread.join()
    return Watched(time.monotonic() - start, peaks["RssAnon"], peaks["VmRSS"], returncode)
