"""Runs the property tests on new random examples, round after round, until the time is up or a round fails.

python tests/fuzz.py --minutes 60 [--jobs 2] [pytest's arguments]

The seed of each round is printed, and repeats it: PICOMPILE_HYPOTHESIS=fuzz pytest -m hypothesis --hypothesis-seed=SEED
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time


def round_of(seed: int, jobs: int, seconds: float, arguments: list[str]) -> int | None:
    """Runs one round. Returns pytest's exit code; None where the time was up first."""
    options = ["-x", "-n", str(jobs), "-m", "hypothesis", f"--hypothesis-seed={seed}"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    environment = {**os.environ, "PICOMPILE_HYPOTHESIS": "fuzz"}
    # In a group of its own: its test processes must go with it.
    process = subprocess.Popen(command, env=environment, start_new_session=True)
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
    end, rounds = start + 60 * options.minutes, 0
    while (left := end - time.monotonic()) > 0:
        seed = random.SystemRandom().randrange(2**32)
        print(f"round {rounds + 1}, seed {seed}, {left / 60:.1f} minutes left", flush=True)
        code = round_of(seed, options.jobs, left, arguments)
        if code:
            print(f"round {rounds + 1} failed, seed {seed}, after {(time.monotonic() - start) / 60:.1f} minutes")
            sys.exit(code)
        rounds += code == 0
    print(f"nothing found in {options.minutes:g} minutes: {rounds} whole rounds and a part of one")


if __name__ == "__main__":
    main()
