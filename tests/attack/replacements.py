"""Two writers that replace one artifact as fast as they can, and a reader: nothing fails, and nothing is left.

    python tests/attack/replacements.py [--number 1000] [--seconds 600] [--seed 0] [--plain]

Each writer makes `--number` replacements, with one of two artifacts that a seed draws. Meanwhile a reader loads what is
there, hashing every byte: it must find a whole artifact each time. `--plain` takes the exchange of names from the
writers, as on file systems that have none; then a reader may find nothing, but never half of something.
"""

import math
import multiprocessing
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.attacks import options

# What a reader says between the two renamings.
_GONE = ("is not a folder", "cannot be opened (No such file or directory)")


@dataclass
class Report:
    """The outcome: replacements, reads that found one of the two artifacts, and a line for each failure."""

    replacements: int = 0
    reads: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def make_artifacts(folder: Path) -> tuple[Path, Path]:
    """Two artifacts of one model that differ in every file with numbers."""
    from helpers.support import compile_for_test, save_tiny_llama

    save_tiny_llama(folder / "model")
    for quant in ("q4", "f16"):
        compile_for_test(folder / "model", folder / quant, quant=quant, context=64, target="native")
    return folder / "q4", folder / "f16"


def attack(artifacts: tuple[Path, Path], work: Path, number: int, end: float, seed: int, plain: bool) -> Report:
    """Two processes with `number` replacements each, as far as they come until `end`, and a reader in a third."""
    output, context, report = work / "artifact", multiprocessing.get_context("fork"), Report()
    shutil.copytree(artifacts[0], output)
    done, queue = context.Event(), context.SimpleQueue()
    writes = [(artifacts, output, number, end, seed + at, plain, queue) for at in (0, 1)]
    processes = [context.Process(target=_write, args=each) for each in writes]
    processes.append(context.Process(target=_read, args=(artifacts, output, done, plain, queue)))
    for process in processes:
        process.start()
    told = [queue.get() for _ in writes]
    done.set()
    told.append(queue.get())
    for process in processes:
        process.join()
    for replacements, reads, failures in told:
        report.replacements += replacements
        report.reads += reads
        report.failures += failures
    left = sorted(path.name for path in work.iterdir() if path != output)
    report.failures += [f"left behind: {name}" for name in left]
    return report


def _write(
    artifacts: tuple[Path, Path], output: Path, number: int, end: float, seed: int, plain: bool, queue: Any
) -> None:
    """Put into `queue` how many replacements were made, and the failures."""
    from picompile.output import place, replacing
    from picompile.output.leftovers import UnsupportedRenameError

    def no_exchange(first: Path, second: Path) -> None:
        raise UnsupportedRenameError

    if plain:
        place.exchange = no_exchange  # type: ignore[assignment]
    draw, made, failures = random.Random(seed), 0, []
    while made < number and time.monotonic() < end:
        try:
            with replacing(output) as folder:
                shutil.copytree(draw.choice(artifacts), folder, dirs_exist_ok=True)
            made += 1
        except Exception as error:
            failures.append(f"replacement {made} of the writer with seed {seed}: {type(error).__name__}: {error}")
            break
    queue.put((made, Counter(), failures))


def _read(artifacts: tuple[Path, Path], output: Path, done: Event, plain: bool, queue: Any) -> None:
    """Put into `queue` what was found until `done`, and the failures."""
    from picompile_runtime import ArtifactError, verify

    known = {verify(artifact).sha256: artifact.name for artifact in artifacts}
    reads: Counter[str] = Counter()
    failures: list[str] = []
    while not done.is_set():
        try:
            reads[known[verify(output).sha256]] += 1
        except (ArtifactError, KeyError) as error:
            if plain and any(text in str(error) for text in _GONE):
                reads["nothing"] += 1
                continue
            reads["failed"] += 1
            failures.append(f"read {reads.total()}: {type(error).__name__}: {error}")
    queue.put((0, reads, failures))


def main() -> int:
    found = options(__doc__, 1000, plain=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        artifacts = make_artifacts(folder)
        (folder / "work").mkdir()
        end = time.monotonic() + (found.seconds or math.inf)
        report = attack(artifacts, folder / "work", found.number or sys.maxsize, end, found.seed, found.plain)
    for failure in report.failures:
        print(f"{failure} (seed {found.seed})")
    reads = ", ".join(f"{count} {what}" for what, count in sorted(report.reads.items()))
    print(f"{report.replacements} replacements, reads: {reads}; {len(report.failures)} failures")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
