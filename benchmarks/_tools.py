"""What the benchmarks share: running picompile as a user does, and watching a process's memory."""

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def picompile(*arguments: object) -> str:
    """Runs the command line; returns its standard output. Stops the benchmark when it fails."""
    command = [sys.executable, "-m", "picompile", *map(str, arguments)]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if finished.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {finished.returncode}")
    return finished.stdout


def picompile_json(*arguments: object) -> dict[str, Any]:
    """The same with `--json`."""
    result: dict[str, Any] = json.loads(picompile(*arguments, "--json"))
    return result


@dataclass(frozen=True)
class Watched:
    """How a process went. Bytes are peaks; `anonymous_bytes` leaves out mapped files."""

    seconds: float
    anonymous_bytes: int
    resident_bytes: int
    returncode: int


def watch(command: list[str], limit_bytes: int | None = None) -> Watched:
    """Runs a command and samples its memory 50 times a second.

    `limit_bytes` is set on the process with RLIMIT_AS, which counts every mapped byte, files and libraries included.
    """
    prefix = ["prlimit", f"--as={limit_bytes}"] if limit_bytes else []
    start = time.monotonic()
    process = subprocess.Popen([*prefix, *command], stdout=subprocess.DEVNULL)
    peaks = {"Anonymous": 0, "Rss": 0}

    def sample() -> None:
        path = Path(f"/proc/{process.pid}/smaps_rollup")
        while process.poll() is None:
            try:
                lines = path.read_text().splitlines()
            except OSError:
                return
            for line in lines:
                name, _, value = line.partition(":")
                if name in peaks and value:
                    peaks[name] = max(peaks[name], int(value.split()[0]) * 1024)
            time.sleep(0.02)

    thread = threading.Thread(target=sample)
    thread.start()
    returncode = process.wait()
    thread.join()
    return Watched(time.monotonic() - start, peaks["Anonymous"], peaks["Rss"], returncode)
