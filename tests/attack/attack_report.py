"""How an attack goes on until a number or the time is up, and what it found."""

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Report:
    """The outcomes of all cases: how many ended in which way, and a line for each wrong one."""

    ended: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """One line."""
        ways = ", ".join(f"{count} {way}" for way, count in self.ended.most_common())
        return f"{self.ended.total()} cases: {ways}; {len(self.failures)} failures"


# One case: (seed) → how it ended, and what was wrong, None where nothing was.
Case = Callable[[int], tuple[str, str | None]]


def attack(case: Case, seconds: float | None, number: int | None, seed: int | None, command: str) -> Report:
    """Runs cases of seeds in a row. Prints a line for each failure, with the `command` that repeats it."""
    first = random.SystemRandom().randrange(2**31) if seed is None else seed
    report, end, done = Report(), None if seconds is None else time.monotonic() + seconds, 0
    while (number is None or done < number) and (end is None or time.monotonic() < end):
        way, wrong = case(first + done)
        report.ended[way] += 1
        if wrong is not None:
            report.failures.append(f"{wrong} ({command} --number 1 --seed {first + done})")
            print(report.failures[-1], flush=True)
        done += 1
    print(report.summary(), flush=True)
    return report


def options(description: str | None) -> argparse.Namespace:
    """`--number`, `--seconds` and `--seed`; with neither of the first two, 300 cases."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--seed", type=int)
    found = parser.parse_args()
    if found.number is None and found.seconds is None:
        found.number = 300
    return found
