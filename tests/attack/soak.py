"""A server's day in short: artifacts are reloaded in turn, used in every way, closed or dropped, while calls fail.

python tests/attack/soak.py --minutes 30 [--seed 0]

It uses toy artifacts, one with a partition of the CPU as hot device. After each round it notes
what this process has: resident memory, threads, descriptors, maps, child processes. Prints the mean and the most of the
first and the last third, and fails where the last third has more than the first beyond the bound.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import api

from helpers.attacks import run_case
from helpers.toys.toy_tokenizers import byte_level
from picompile_runtime import Engine, PicompileRuntimeError, SamplingParams, Tokenizer, generate, load, verify

CHAT = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
ENDLESS = "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"


@dataclass(frozen=True)
class Held:
    """The resources that the process holds at one time."""

    resident_mib: float
    threads: float
    descriptors: float
    maps: float
    children: float

    @classmethod
    def now(cls) -> Held:
        """Take it, after a collection."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        threads, descriptors = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
        maps = len(Path("/proc/self/maps").read_text().splitlines())
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        return cls(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, threads, descriptors, maps, len(children))


# By how much the mean of the last third may exceed that of the first: what allocators vary by.
MAY_GROW = Held(resident_mib=4.0, threads=0.5, descriptors=0.5, maps=8.0, children=0.5)


class Soak:
    """Rounds on artifacts that are copied anew each time, as a release is, so that nothing of the last is reused."""

    def __init__(self, artifacts: Sequence[Path], work: Path, seed: int) -> None:
        self.artifacts, self.work = artifacts, work
        self.random = np.random.default_rng(seed)
        self.rounds = self.refused = 0

    def round(self) -> None:
        """Load the next artifact, use it, and let it go."""
        folder = self.work / f"release{self.rounds}"
        shutil.copytree(self.artifacts[self.rounds % len(self.artifacts)], folder)
        try:
            self._use(folder)
        finally:
            shutil.rmtree(folder)
        self.rounds += 1

    def _use(self, folder: Path) -> None:
        seed = int(self.random.integers(2**31))
        # Right and wrong calls, every third time in two threads.
        if failures := api.run([folder], seed):
            raise AssertionError(failures[0])
        engine, other = load(folder, threads=1 + seed % 3), load(folder, threads=2)  # share code and weights
        self._broken(folder)
        self._chat(engine)
        if self.rounds % 4 == 0:
            child = run_case(lambda: f"ran {engine.reset()} {engine.prefill([1, 2, 3]).size}", limit_s=60)
            if child.is_fault:
                raise AssertionError(f"a forked process failed: {child.word} {child.detail}")
        if self.rounds % 10 == 0:
            verify(folder)
        # Some are closed, some are forgotten.
        for each in (engine, other):
            if self.random.random() < 0.5:
                each.close()
                self._refuses(partial(each.decode, 1))

    def _broken(self, folder: Path) -> None:
        broken = folder.with_name(f"{folder.name}-broken")
        shutil.copytree(folder, broken)
        for name in ("kernels/host.so", "weights.safetensors", "program.json"):
            if (path := broken / name).exists():
                content = bytearray(path.read_bytes())
                content[int(self.random.integers(len(content)))] ^= 1
                path.write_bytes(content)
                self._refuses(lambda: load(broken))
        shutil.rmtree(broken)
        self._refuses(lambda: load(broken))

    def _refuses(self, call: Callable[[], object]) -> None:
        try:
            call()
        except PicompileRuntimeError:
            self.refused += 1
        else:
            raise AssertionError("a wrong call was not refused")

    def _chat(self, engine: Engine) -> None:
        text = byte_level()._tokenizer.to_str()
        tokenizer = Tokenizer(text, {}, CHAT)
        for _ in range(3):
            ids = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
        self._refuses(lambda: tokenizer.encode_chat([{"role": object()}]))
        if self.rounds % 5 == 0:
            self._refuses(lambda: Tokenizer(text, {}, ENDLESS).encode_chat([{}]))
        engine.start_timing()
        prompt = [token % engine.vocab for token in ids]
        "".join(generate(engine, tokenizer, prompt, SamplingParams(seed=1), 5))
        engine.stop_timing()


def soak(artifacts: Sequence[Path], work: Path, seconds: float, seed: int, warm: int = 60) -> tuple[list[Held], Soak]:
    """Run rounds for so long, and twelve at least; return what was held behind each but the first, `warm` ones.

    In those modules are imported, and memory is taken that allocators keep.
    """
    rounds, held = Soak(artifacts, work, seed), []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(held) < 12:
        rounds.round()
        if rounds.rounds > warm:
            held.append(Held.now())
    return held, rounds


def growth(held: Sequence[Held], may_grow: Held = MAY_GROW) -> list[str]:
    """Return what grew beyond its bound from the first third to the last, and print both thirds."""
    third = len(held) // 3
    first, last = (np.array([astuple(each) for each in part]) for part in (held[:third], held[-third:]))
    found = []
    for index, name in enumerate(each.name for each in fields(Held)):
        before, after, may = first[:, index], last[:, index], getattr(may_grow, name)
        print(
            f"{name:>14}: first third mean {before.mean():.1f}, most {before.max():.1f}; last third mean "
            f"{after.mean():.1f}, most {after.max():.1f}; may grow by {may:g}"
        )
        if after.mean() > before.mean() + may:
            found.append(f"{name} grew from {before.mean():.1f} to {after.mean():.1f}")
    return found


def main() -> None:
    """Soak for the time given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        held, rounds = soak(api.write_folders(Path(base)), Path(base), 60 * options.minutes, options.seed)
    found = growth(held)
    for failure in found:
        print(f"seed {options.seed}: {failure}")
    print(f"{rounds.rounds} rounds, {rounds.refused} calls refused as they must be, {len(found)} failed")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
