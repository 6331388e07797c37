"""Plants each of the faults in a copy of the passes and runs the property suite on it.

python tests/mutation/check.py [--only TEXT] [--jobs 2] [--write]

A fault that the suite does not notice is a hole in the suite. `--write` writes the table, `tests/mutation/table.md`;
the rows of faults that were not chosen stay.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
PASSES = ROOT / "passes" / "picompile_passes"
SUITE = ROOT / "tests" / "passes" / "test_properties.py"
TABLE = Path(__file__).with_name("table.md")

# pytest's exit code where no test was chosen.
_NO_TESTS = 5

# Of the suite: a test that fails, then the property, if it was one of `check_pass`.
_FAILED = re.compile(r"^FAILED \S+::(\S+)", re.MULTILINE)
_PROPERTY = re.compile(r"PropertyError: property (\S+) does not hold")


@dataclass(frozen=True)
class Outcome:
    """The suite's verdict: the test that failed and why, None if none did."""

    fault: Fault
    found_by: str | None
    seconds: float


def plant(fault: Fault, folder: Path) -> None:
    """Copies the passes into `folder`, with the fault. Raises `ValueError` where it does not fit the source."""
    shutil.copytree(PASSES, folder / "picompile_passes", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "picompile_passes" / fault.file
    source = path.read_text(encoding="utf-8")
    if source.count(fault.old) != 1 or fault.old == fault.new:
        raise ValueError(f"{fault.name}: {fault.old!r} stands {source.count(fault.old)} times in {fault.file}")
    path.write_text(source.replace(fault.old, fault.new), encoding="utf-8")


def check(fault: Fault | None) -> Outcome:
    """Runs the suite with `fault` planted; with none, on the passes as they are."""
    with tempfile.TemporaryDirectory(prefix="picompile-mutation-") as name:
        folder = Path(name)
        if fault is not None:
            plant(fault, folder)
        start = time.monotonic()
        # The tests of the pass itself first: mostly they are the ones that fail.
        stem = Path(fault.file).stem if fault is not None else ""
        own = f"{stem} or {stem.replace('_', '-')}" if stem else ""
        found_by = (_run_suite(name, ["-k", own]) if own else None) or _run_suite(name, [])
    return Outcome(fault or Fault("none", "", "", ""), found_by, time.monotonic() - start)


def _run_suite(folder: str, arguments: list[str]) -> str | None:
    """Runs the suite with the packages in `folder` ahead of those installed. What failed, None where nothing did."""
    path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PICOMPILE_HYPOTHESIS": "mutation", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", str(SUITE), "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 1, 2, _NO_TESTS):
        sys.exit(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return _found_by(done.stdout) if done.returncode in (1, 2) else None


def _found_by(output: str) -> str:
    properties, tests = _PROPERTY.findall(output), _FAILED.findall(output)
    test = tests[0] if tests else "import"
    return f"{test}: {properties[-1]}" if properties else test


def earlier() -> dict[str, str | None]:
    """Return the table's entry for each fault, by name."""
    text = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
    rows = re.findall(r"^\| (.+) \| `.+` \| (?:`(.+)`|\*\*not found\*\*) \|$", text, re.MULTILINE)
    return {name: by or None for name, by in rows}


def table(outcomes: list[Outcome]) -> Iterator[str]:
    """The lines of the table."""
    found = sum(outcome.found_by is not None for outcome in outcomes)
    yield "# Planted faults"
    yield ""
    yield f"The property suite finds {found} of {len(outcomes)}."
    yield ""
    yield "    python tests/mutation/check.py --write"
    yield ""
    yield "plants each fault in a copy of the passes, one at a time, and runs `tests/passes/test_properties.py` until"
    yield "a test fails. The last column is that test and, after the colon, the one of `picompile.testing.PROPERTIES`"
    yield "that did not hold."
    yield ""
    yield "| fault | in | found by |"
    yield "| --- | --- | --- |"
    for outcome in outcomes:
        by = f"`{outcome.found_by}`" if outcome.found_by else "**not found**"
        yield f"| {outcome.fault.name} | `{outcome.fault.file}` | {by} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose name or file holds this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    chosen = [fault for fault in FAULTS if options.only in fault.name or options.only in fault.file]
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        sound = pool.submit(check, None)
        for outcome in pool.map(check, chosen):
            outcomes.append(outcome)
            print(f"{outcome.seconds:5.0f} s  {outcome.fault.name}: {outcome.found_by or 'NOT FOUND'}", flush=True)
    if sound.result().found_by is not None:
        sys.exit(f"the suite fails without any fault: {sound.result().found_by}")
    print(f"without a fault the suite passes, in {sound.result().seconds:.0f} s")
    if options.write:
        rows = earlier() | {outcome.fault.name: outcome.found_by for outcome in outcomes}
        known = [Outcome(fault, rows[fault.name], 0.0) for fault in FAULTS if fault.name in rows]
        TABLE.write_text("\n".join(table(known)) + "\n", encoding="utf-8")
    found = sum(outcome.found_by is not None for outcome in outcomes)
    print(f"found {found} of {len(outcomes)}")


if __name__ == "__main__":
    main()
