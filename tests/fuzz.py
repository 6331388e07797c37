"""Runs property tests and attacks on new random examples, turn by turn, until the time is up or one fails.

python tests/fuzz.py --minutes 60 [--jobs 2] [pytest's arguments]

Behind every two attacks of tests/attack, which have a minute each, comes a round of the property tests, or a fiftieth
of all cases of the tests whose parameters are otherwise samples (helpers/products.py). The seed of each turn is
printed, and repeats it:

PICOMPILE_HYPOTHESIS=fuzz pytest -m hypothesis --hypothesis-seed=SEED
PICOMPILE_PRODUCTS=whole pytest -m "products and slow" --share 0.02 --share-seed SEED
python tests/attack/NAME.py --seed SEED
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

ATTACKS = (
    *("artifacts", "api", "checkpoints", "configs", "caches", "disks", "gguf_models", "replacements"),
    *("tokenizer_files", "writers"),
)


@dataclass(frozen=True)
class Round:
    """pytest's options, and what it has in its environment."""

    options: tuple[str, ...]
    environment: Mapping[str, str]


TESTS = {
    "property tests": Round(("-m", "hypothesis", "--hypothesis-seed={seed}"), {"PICOMPILE_HYPOTHESIS": "fuzz"}),
    # These draw their numbers by their names, as in other runs, so that the seed alone repeats a round.
    "products": Round(
        ("-m", "products and slow", "--share", "0.02", "--share-seed", "{seed}"), {"PICOMPILE_PRODUCTS": "whole"}
    ),
}
_ATTACK_S = 60.0
# A turn begins with what takes time before its clock runs, such as to compile what is attacked.
_MOST_BEFORE_S = 240.0


def round_of_tests(name: str, seed: int, jobs: int, arguments: Sequence[str]) -> list[str]:
    """The command of a round of `TESTS`."""
    options = [option.format(seed=seed) for option in TESTS[name].options]
    return [sys.executable, "-m", "pytest", "-x", "-n", str(jobs), *options, *arguments]


def attack(name: str, seed: int, seconds: float) -> list[str]:
    """The command of an attack."""
    script = Path(__file__).parent / "attack" / f"{name}.py"
    return [sys.executable, str(script), "--number", "1000000", "--seconds", f"{seconds:.0f}", "--seed", str(seed)]


def turns() -> Iterator[str]:
    """The names of the attacks, in a new order; behind every two of them one of `TESTS`."""
    rounds = cycle(TESTS)
    for turn, name in enumerate(cycle(random.SystemRandom().sample(ATTACKS, len(ATTACKS))), start=1):
        yield name
        if turn % 2 == 0:
            yield next(rounds)


def run(command: Sequence[str], seconds: float, environment: Mapping[str, str]) -> int | None:
    """The exit code of `command`, with more in its environment; None where the time was up first."""
    # In a group of its own: its processes must go with it.
    process = subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options, arguments = parser.parse_known_args()
    start = time.monotonic()
    end, done = start + 60 * options.minutes, 0
    for turn, name in enumerate(turns(), start=1):
        left = end - time.monotonic()
        if left <= 0:
            break
        seed = random.SystemRandom().randrange(2**31)
        print(f"turn {turn}, {name}, seed {seed}, {left / 60:.1f} minutes left", flush=True)
        if name in TESTS:
            code = run(round_of_tests(name, seed, options.jobs, arguments), left, TESTS[name].environment)
        else:
            code = run(attack(name, seed, min(left, _ATTACK_S)), min(left, _ATTACK_S) + _MOST_BEFORE_S, {})
        if code:
            print(f"turn {turn} failed, seed {seed}, after {(time.monotonic() - start) / 60:.1f} minutes")
            sys.exit(code)
        done += code == 0
    print(f"nothing found in {options.minutes:g} minutes: {done} whole turns")


if __name__ == "__main__":
    main()
