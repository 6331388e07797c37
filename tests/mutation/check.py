"""Makes faults in the passes and in lowering, one at a time, and runs the tests that execute the line on each.

python tests/mutation/check.py [FILE…] [--number 200] [--seed 1] [--jobs 2] [--write]

A fault that no test notices is a hole in the suite, or changes nothing that matters. Which tests execute which line is
measured first, once for a state of the sources, with the fast tests; `--tests` names others. `--write` writes the
table, `tests/mutation/table.md`, and keeps the reasons that stand there.

The first run takes a quarter of an hour for that, and each fault some ten seconds.
"""

import argparse
import hashlib
import multiprocessing
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

from mutants import Mutant, draw

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from helpers import times  # noqa: E402

FOLDERS = ("passes/picompile_passes", "codegen/picompile_codegen/lowering")
TABLE = Path(__file__).with_name("table.md")
# Behind so many seconds of tests that pass, a fault counts as not found.
PATIENCE_S = 120.0
# Most faults are found by the first of the tests: the others' modules need not be imported for them.
FIRST = 8
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """A fault and the test that failed on it: None if none did."""

    mutant: Mutant
    found_by: str | None
    tests: int
    seconds: float


@dataclass(frozen=True)
class Reach:
    """Which tests execute a line, which ask for what another's fixture made by it, and how long each takes."""

    tests: Mapping[tuple[str, int], set[str]]
    sharing: Mapping[tuple[str, int], set[str]]
    seconds: Mapping[str, float]

    def of(self, mutant: Mutant) -> list[str]:
        """Return the tests that execute a place, the quickest first, then those that share, as `PATIENCE_S` allows.

        Of a place that an import executes, these are all tests that execute anything of the file, or of its folder
        where there are none: a table is read by others than call the functions that are written in it.
        """
        found = {test for line in mutant.lines for test in self.tests.get((mutant.file, line), ())}
        if not found or not mutant.where:
            for around in (mutant.file, f"{Path(mutant.file).parent}/"):
                found |= {test for (file, _), tests in self.tests.items() if file.startswith(around) for test in tests}
                if found:
                    break
        sharing = {test for line in mutant.lines for test in self.sharing.get((mutant.file, line), ())} - found
        chosen, left = [], PATIENCE_S
        for test in [*sorted(found, key=self.seconds.__getitem__), *sorted(sharing, key=self.seconds.__getitem__)]:
            if self.seconds[test] <= left:
                left -= self.seconds[test]
                chosen.append(test)
        return chosen


def measured_reach(tests: Sequence[str], jobs: int) -> Reach:
    """Return what the tests execute, by a run of them, or by what an earlier run on the same sources left."""
    folder = ROOT / "build" / "mutation" / _state(tests)
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        print("measuring which tests execute which line", flush=True)
        environment = {
            **os.environ,
            "COVERAGE_FILE": str(folder / "coverage"),
            times.FOLDER_VARIABLE: str(folder),
            "PICOMPILE_TEST_SHARED": str(folder / "shared"),
        }
        workers = ["-n", str(jobs), "--dist", "worksteal"] if jobs > 1 else ["-p", "no:xdist"]
        sources = ["--cov=picompile_passes", "--cov=picompile_codegen.lowering"]
        command = [sys.executable, "-m", "pytest", *workers, *sources, "--cov-context=test", "--cov-report=", *tests]
        if subprocess.run(command, cwd=ROOT, env=environment).returncode != 0:
            sys.exit("the tests fail without any fault")
        (folder / "done").touch()
    return _read(folder)


def _state(tests: Sequence[str]) -> str:
    """Return a hash of all that decides what the tests execute."""
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    found = hashlib.sha256("\0".join(tests).encode())
    for name in filter(None, names):
        if (ROOT / name).exists() and not name.startswith("tests/mutation/"):
            found.update(name.encode() + b"\0" + (ROOT / name).read_bytes() + b"\0")
    return found.hexdigest()[:16]


def _read(folder: Path) -> Reach:
    """Return what `measured_reach` left in a folder.

    Lines that a fixture executes belong to each test that has the fixture's setting up, and its artifact may be read by
    others: a test that asks for a fixture of the same name, of a module or of all, counts as executing the same.
    """
    from coverage.numbits import numbits_to_nums

    seconds: dict[str, float] = defaultdict(float)
    fixtures: dict[str, float] = {}
    sharing: dict[str, set[str]] = defaultdict(set)
    shares: dict[str, list[str]] = {}
    for kind, name, spent, known in times.read(folder):
        if kind == "test":
            seconds[name], shares[name] = spent, known
            for fixture in known:
                sharing[fixture].add(name)
        else:
            fixtures[name] = spent
    # With a fault a test runs alone, and makes what it shares with others.
    for name, known in shares.items():
        seconds[name] += sum(fixtures.get(fixture, 0.0) for fixture in known)
    reached: dict[tuple[str, int], set[str]] = defaultdict(set)
    shared: dict[tuple[str, int], set[str]] = defaultdict(set)
    database = sqlite3.connect(folder / "coverage")
    rows = database.execute(
        "select file.path, context.context, arc.fromno, arc.tono from arc join file on file.id = arc.file_id"
        " join context on context.id = arc.context_id"
        if _has_arcs(database)
        else "select file.path, context.context, line_bits.numbits, 0 from line_bits"
        " join file on file.id = line_bits.file_id join context on context.id = line_bits.context_id"
    )
    for path, context, first, second in rows:
        test, _, phase = context.partition("|")
        lines = [first, second] if isinstance(first, int) else numbits_to_nums(first)
        others = set().union(*(sharing[name] for name in shares.get(test, ()))) if phase == "setup" else set()
        for line in lines:
            if line > 0 and test:
                reached[os.path.relpath(path, ROOT), line].add(test)
                shared[os.path.relpath(path, ROOT), line] |= others
    return Reach(reached, shared, seconds)


def _has_arcs(database: sqlite3.Connection) -> bool:
    return bool(database.execute("select exists (select 1 from arc)").fetchone()[0])


def plant(mutant: Mutant, folder: Path) -> None:
    """Copy the package that has the fault into `folder`, with the fault."""
    package = Path(*Path(mutant.file).parts[:2])
    shutil.copytree(ROOT / package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / Path(mutant.file).relative_to(package.parent)
    path.write_bytes(mutant.applied(path.read_bytes()))


def check(mutant: Mutant, tests: Sequence[str], shared: Path | None) -> Outcome:
    """Run the tests with a fault, the first ones and then the others in a process of their own, until one fails.

    Args:
        mutant: The fault.
        tests: Their ids. None of them: the fault is not found.
        shared: A folder with kernels that an earlier run compiled; the run gets a copy.
    """
    found_by = None
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="picompile-mutation-") as name:
        plant(mutant, Path(name))
        if shared is not None and (shared / "objects").exists():
            shutil.copytree(shared / "objects", Path(name) / "shared" / "objects", copy_function=os.link)
        for some in filter(None, (tests[:FIRST], tests[FIRST:])):
            found_by = found_by or _failing(Path(name), some)
    return Outcome(mutant, found_by, len(tests), time.monotonic() - start)


def _failing(folder: Path, tests: Sequence[str]) -> str | None:
    """Return the test that fails with the package in `folder`, or None."""
    process = multiprocessing.get_context("fork").Process(target=_run, args=(str(folder), list(tests)))
    process.start()
    process.join(6 * PATIENCE_S)
    has_ended = not process.is_alive()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    if not has_ended:
        return "a test that does not end"
    output = (folder / "output").read_text(errors="replace")
    return next(iter(_FAILED.findall(output)), "importing it") if process.exitcode else None


def _run(folder: str, tests: list[str]) -> None:
    """Run pytest in this process, with the packages in `folder` ahead of those installed."""
    import pytest

    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    os.environ["PICOMPILE_TEST_SHARED"] = str(Path(folder) / "shared")
    os.environ.update(OMP_NUM_THREADS="1", PICOMPILE_HYPOTHESIS="mutation")
    os.setsid()
    os.chdir(ROOT)
    arguments = ["-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={folder}/tmp"]
    with (Path(folder) / "output").open("w", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
        code = pytest.main([*arguments, *tests])
    os._exit(int(code))


def check_all(mutants: Sequence[Mutant], reach: Reach, jobs: int, shared: Path | None) -> Iterator[Outcome]:
    """Yield the outcome of each fault, as they come, `jobs` at a time."""
    # Their processes begin with these imported. None of picompile: each imports its own.
    import hypothesis  # noqa: F401
    import torch
    import transformers  # noqa: F401
    import tvm  # noqa: F401

    torch.set_num_threads(1)
    from concurrent.futures import ThreadPoolExecutor, as_completed

    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(check, mutant, reach.of(mutant), shared) for mutant in mutants]
        for done in as_completed(waiting):
            yield done.result()


def reasons() -> dict[tuple[str, str], str]:
    """Return what the table says of each fault that was not found, by file and name."""
    text = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
    rows = re.findall(r"^\| `(.+)`, (.+) \| (.*) \|$", text, re.MULTILINE)
    return {(file, name): reason for file, name, reason in rows}


def table(outcomes: Sequence[Outcome], command: str, commit: str) -> Iterator[str]:
    """Yield the table's lines. The draw changes with the sources, so it is of a commit."""
    found = [outcome for outcome in outcomes if outcome.found_by]
    known = reasons()
    yield "# Random faults"
    yield ""
    yield f"    {command}"
    yield ""
    yield f"found {len(found)} of {len(outcomes)} faults, drawn from the syntax trees at commit {commit}."
    yield "Each was planted in a copy of the package, and the tests that execute the line ran on it until one failed."
    yield ""
    yield "| file | faults | found |"
    yield "| --- | --- | --- |"
    by_file: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_file[outcome.mutant.file].append(outcome)
    for file, each in sorted(by_file.items()):
        yield f"| `{file}` | {len(each)} | {sum(outcome.found_by is not None for outcome in each)} |"
    yield ""
    yield "| not found | why |"
    yield "| --- | --- |"
    for outcome in outcomes:
        if not outcome.found_by:
            name = outcome.mutant.name.replace("|", "\\|")
            yield f"| `{outcome.mutant.file}`, {name} | {known.get((outcome.mutant.file, name), '')} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=FOLDERS, help="files or folders whose faults are made")
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tests", nargs="+", default=["-m", "not slow"], help="pytest's arguments")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    mutants = draw(ROOT, options.files, options.number, options.seed)
    reach = measured_reach(options.tests, options.jobs)
    shared = ROOT / "build" / "mutation" / _state(options.tests) / "shared"
    outcomes = []
    for outcome in check_all(mutants, reach, options.jobs, shared):
        outcomes.append(outcome)
        verdict = outcome.found_by or f"NOT FOUND by {outcome.tests} tests"
        print(
            f"{outcome.seconds:5.0f} s  {outcome.mutant.file}:{outcome.mutant.line} {outcome.mutant.name}: {verdict}",
            flush=True,
        )
    outcomes.sort(key=lambda outcome: (outcome.mutant.file, outcome.mutant.start))
    if options.write:
        files = "" if options.files == FOLDERS else " " + " ".join(options.files)
        command = f"python tests/mutation/check.py{files} --number {options.number} --seed {options.seed} --write"
        head = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(head, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        TABLE.write_text("\n".join(table(outcomes, command, commit)) + "\n", encoding="utf-8")
    print(f"found {sum(outcome.found_by is not None for outcome in outcomes)} of {len(outcomes)}")


if __name__ == "__main__":
    main()
