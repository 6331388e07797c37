"""Counts how often threads of an artifact sleep and are woken while it decodes, and measures how fast it is.

    python benchmarks/futex.py ARTIFACT [ARTIFACT ...] [--threads 4] [--rounds 3] [--prompt 16] [--tokens 200]

Prints a Markdown table with the futex calls a token of each artifact's thread pools, least to most of all rounds, in
which the artifacts take turns. Of a hybrid artifact, host and hot device (a partition of the CPU) have a pool each. The
calls of Python and the C library are not among them: `futex_count.c` is preloaded, and says how it knows. Speeds are
medians; the ratio is the median of each round's, to the first artifact.
"""

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import picompile_runtime
from picompile_runtime.engine.engine import Engine

_SIDES = ("host", "hot")  # what the names of libraries begin with
_KINDS = ("workers sleep", "workers wake", "launcher sleeps", "launcher wakes")
_MOST_ROWS = 1024  # MOST_ROWS


class _Row(ctypes.Structure):
    _fields_ = (
        ("thread", ctypes.c_long),
        ("is_wake", ctypes.c_long),
        ("count", ctypes.c_long),
        ("library", ctypes.c_char * 64),
    )


@dataclass(frozen=True)
class _Turn:
    """Futex calls a token by side and kind, and tokens a second."""

    calls: dict[tuple[str, str], float]
    speed: float

    @property
    def total(self) -> float:
        return sum(self.calls.values())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", metavar="ARTIFACT", type=Path, nargs="+")
    parser.add_argument("--threads", type=int, default=4, help="of a hybrid artifact, half are the hot device's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200, help="decoded in each turn")
    return parser.parse_args()


def _preloaded() -> ctypes.CDLL | None:
    """Return the library that futex_count.c makes, if this process has it."""
    process = ctypes.CDLL(None)
    return process if hasattr(process, "futex_rows") else None


def _run_preloaded() -> int:
    """Runs this script again, with the counter."""
    with tempfile.TemporaryDirectory() as folder:
        counter = Path(folder) / "futex_count.so"
        flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        source = Path(__file__).with_name("futex_count.c")
        subprocess.run(["gcc", *flags, "-o", str(counter), str(source), "-ldl", "-lpthread"], check=True)
        environment = {**os.environ, "LD_PRELOAD": str(counter)}
        return subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode


def _calls(counter: ctypes.CDLL) -> Counter[tuple[str, str]]:
    """Futex calls so far, by side and kind. A thread that Python does not know is a worker."""
    rows = (_Row * _MOST_ROWS).in_dll(counter, "futex_rows")
    launchers = {thread.native_id for thread in threading.enumerate()}
    found: Counter[tuple[str, str]] = Counter()
    for row in rows[: ctypes.c_int.in_dll(counter, "futex_row_count").value]:
        name = Path(os.path.realpath(row.library.decode())).name
        side = next((side for side in _SIDES if name.startswith(f"{side}.")), name)
        who = "launcher" if row.thread in launchers else "workers"
        verb = "wake" if row.is_wake else "sleep"
        found[side, f"{who} {verb}{'s' if who == 'launcher' else ''}"] += row.count
    return found


def _turn(engine: Engine, counter: ctypes.CDLL, text: Sequence[int], prompt: int) -> _Turn:
    """Decodes `text` behind its first `prompt` tokens, which have been read."""
    engine.rewind(prompt)
    before, start = _calls(counter), time.perf_counter()
    for token in text[prompt:]:
        engine.decode(token)
    seconds, after = time.perf_counter() - start, _calls(counter)
    count = len(text) - prompt
    return _Turn({key: calls / count for key, calls in (after - before).items()}, count / seconds)


def _turns(options: argparse.Namespace, counter: ctypes.CDLL) -> dict[Path, list[_Turn]]:
    engines = {path: picompile_runtime.load(path, threads=options.threads) for path in options.artifacts}
    turns: dict[Path, list[_Turn]] = {path: [] for path in engines}
    texts = {}
    for path, engine in engines.items():
        random = np.random.default_rng(0)
        texts[path] = random.integers(0, engine.vocab, options.prompt + options.tokens).tolist()
        engine.prefill(texts[path][: options.prompt])
        _turn(engine, counter, texts[path], options.prompt)
    for _ in range(options.rounds):
        for path, engine in engines.items():
            turns[path].append(_turn(engine, counter, texts[path], options.prompt))
    return turns


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def _print(turns: dict[Path, list[_Turn]]) -> None:
    first = next(iter(turns.values()))
    print("| artifact | pool | " + " | ".join(_KINDS) + " | all |")
    print("| --- " * (3 + len(_KINDS)) + "|")
    for path, own in turns.items():
        for side in _SIDES:
            cells = [_range([turn.calls.get((side, kind), 0.0) for turn in own]) for kind in _KINDS]
            total = _range([sum(n for (where, _), n in turn.calls.items() if where == side) for turn in own])
            print(f"| {path.name} | {side} | {' | '.join(cells)} | {total} |")
    print("\n| artifact | futex calls a token | tokens/s | of the first |\n| --- | --- | --- | --- |")
    for path, own in turns.items():
        ratio = statistics.median(turn.speed / other.speed for turn, other in zip(own, first, strict=True))
        speed = statistics.median(turn.speed for turn in own)
        print(f"| {path.name} | {_range([turn.total for turn in own])} | {speed:.1f} | {ratio:.0%} |")


def main() -> None:
    options = _arguments()
    counter = _preloaded()
    if counter is None:
        sys.exit(_run_preloaded())
    _print(_turns(options, counter))
    print(f"\n{options.rounds} interleaved rounds of {options.tokens} tokens behind {options.prompt}.")


if __name__ == "__main__":
    main()
