"""Two writers that replace one artifact as fast as they can, and a reader: nothing fails, and nothing is left.

    python tests/attack/replacements.py [--number 1000] [--seconds 600] [--seed 0] [--plain]

Each writer makes `--number` replacements, with one of two artifacts that a seed draws. Meanwhile a reader loads what is
there, hashing every byte: it must find a whole artifact each time. `--plain` takes the exchange of names from the
writers, as on file systems that have none; then a reader may find nothing, but never half of something.
"""

import math
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.attacks import options

# What a reader says between the two renamings.
# For short work a writer waits for others.
_WAIT_S = 30.0
_GONE = ("is not a folder", "cannot be opened (No such file or directory)")


def make_artifacts(folder: Path) -> tuple[Path, Path]:
    """Two artifacts of one model that differ in every file with numbers."""
    from helpers.support import compile_for_test, save_tiny_llama

    save_tiny_llama(folder / "model")
    for quant in ("q4", "f16"):
        compile_for_test(folder / "model", folder / quant, quant=quant, context=64, target="native")
    return folder / "q4", folder / "f16"


def attack(
    artifacts: tuple[Path, Path], work: Path, number: int, end: float, seed: int, plain: bool
) -> tuple[int, Counter[str], list[str]]:
    """Two processes with `number` replacements each, as far as they come until `end`, and a reader in a third.

    Return the number of replacements, what the reader found how often, and the failures.
    """
    output, begun, done = work / "artifact", work.with_name(f"{work.name}-begun"), work.with_name(f"{work.name}-done")
    shutil.copytree(artifacts[0], output)
    with ProcessPoolExecutor(3, get_context("fork")) as processes:
        reading = processes.submit(_read, artifacts, output, begun, done, plain)
        while not (begun.exists() or reading.done()):
            time.sleep(0.001)
        writing = [processes.submit(_write, artifacts, output, number, end, seed + at, plain) for at in (0, 1)]
        try:
            replacements = sum(each.result() for each in writing)
        finally:
            done.touch()
    reads, failures = reading.result()
    return replacements, reads, failures + [f"left behind: {path}" for path in work.iterdir() if path != output]


def _write(artifacts: tuple[Path, Path], output: Path, number: int, end: float, seed: int, plain: bool) -> int:
    """Return how many replacements were made."""
    from picompile.output import place
    from picompile.output.leftovers import UnsupportedRenameError

    def no_exchange(first: Path, second: Path) -> None:
        raise UnsupportedRenameError

    if plain:
        place.exchange = no_exchange  # type: ignore[assignment]
    draw, made = random.Random(seed), 0
    while made < number and time.monotonic() < end:
        with place.reserve(output, overwrite=True, wait_s=_WAIT_S) as reserved, reserved.folder() as folder:
            shutil.copytree(draw.choice(artifacts), folder, dirs_exist_ok=True)
        made += 1
    return made


def _read(
    artifacts: tuple[Path, Path], output: Path, begun: Path, done: Path, plain: bool
) -> tuple[Counter[str], list[str]]:
    """Return what was found until `done` is there, and the failures. `begun` is there when it begins."""
    from picompile_runtime import ArtifactError, verify

    known = {verify(artifact).sha256: artifact.name for artifact in artifacts}
    reads: Counter[str] = Counter()
    failures: list[str] = []
    begun.touch()
    while not done.exists():
        try:
            reads[known[verify(output).sha256]] += 1
        except (ArtifactError, KeyError) as error:
            if plain and any(text in str(error) for text in _GONE):
                reads["nothing"] += 1
                continue
            reads["failed"] += 1
            failures.append(f"read {reads.total()}: {type(error).__name__}: {error}")
    return reads, failures


def main() -> int:
    found = options(__doc__, 1000, plain=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        artifacts = make_artifacts(folder)
        (folder / "work").mkdir()
        end, number = time.monotonic() + (found.seconds or math.inf), found.number or sys.maxsize
        replacements, reads, failures = attack(artifacts, folder / "work", number, end, found.seed, found.plain)
    print(*failures, f"{replacements} replacements from seed {found.seed}, reads: {dict(reads)}", sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
