"""Time until a server answers: at its first start, and at later ones.

    python -m benchmarks.cpu.serve_start ARTIFACT [--rounds 5] [--threads N] [--json FILE]

Measures, from the start of the process until GET /health answers 200, in seconds (median and worst of the rounds):

- first: the artifact is in the page cache, but was never loaded by this user, so that its weights are hashed;
- warm: it was loaded before;
- cold: it was loaded before, and its files are not in the page cache, from which they are dropped. Where they still are
  (tmpfs, or another process has them mapped), `share_of_weights_still_cached` says so.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.script import argument_parser, write_json
from benchmarks.serving import ServedArtifact


def main() -> None:
    options = argument_parser(__doc__, "artifact", "--threads", "--json", rounds=5).parse_args()
    result = measure(options)
    print(json.dumps(result, indent=2))
    write_json(options.json, result)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds and return the figures."""
    folder, rounds = options.artifact, range(options.rounds)

    def start_s(cache: str) -> float:
        """Return how long a server takes that keeps the stamps of files that were found whole in `cache`."""
        with ServedArtifact(folder, options.threads, {"XDG_CACHE_HOME": cache}) as server:
            return server.start_s

    with tempfile.TemporaryDirectory() as cache:
        first = []
        for number in rounds:
            read(folder)
            first.append(start_s(f"{cache}/{number}"))
        start_s(cache)
        warm = [start_s(cache) for _ in rounds]
        cold, shares = [], []
        for _ in rounds:
            shares.append(drop_from_page_cache(folder))
            cold.append(start_s(cache))
    still_cached = max((share for share in shares if share is not None), default=None)
    return {
        "artifact_bytes": sum(file.stat().st_size for file in files(folder)),
        "first_s": summary(first),
        "warm_s": summary(warm),
        "cold_s": {**summary(cold), "share_of_weights_still_cached": still_cached},
    }


def summary(seconds: list[float]) -> dict[str, float]:
    """Return the median and the worst."""
    return {"median": round(statistics.median(seconds), 3), "worst": round(max(seconds), 3)}


def files(folder: Path) -> list[Path]:
    """Return the files of an artifact."""
    return [path for path in folder.rglob("*") if path.is_file()]


def read(folder: Path) -> None:
    """Have the files in the page cache."""
    for path in files(folder):
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass


def drop_from_page_cache(folder: Path) -> float | None:
    """Drop the files of an artifact from the page cache. Return the share of the largest that is still there."""
    for path in files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return share_in_page_cache(max(files(folder), key=lambda path: path.stat().st_size))


def share_in_page_cache(path: Path) -> float | None:
    """Return which share of a file is in the page cache; None without util-linux's `fincore`."""
    program = shutil.which("fincore")
    if program is None:
        return None
    told = subprocess.run(
        [program, "--bytes", "--noheadings", "--output", "RES", path], capture_output=True, check=True
    )
    return int(told.stdout) / path.stat().st_size


if __name__ == "__main__":
    main()
