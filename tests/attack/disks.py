"""Commands that write to full and read-only disks: one line with the right exit code, and nothing lost or left.

    python tests/attack/disks.py [--number 100] [--seconds 600] [--seed 0] [--commands compile,synth]

A case draws a command, whether it replaces something, and a disk: a limit on the size of files, which works everywhere,
or, where this user may mount one, a small file system or a read-only one for the output or for temporary files. The
command must end well, or with exit code 5 (2 where nothing can be written at all) and one line of error; the output is
old or new, and nothing is beside it.
"""

import argparse
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from writers import Attack, import_once, left_behind, run_command

from helpers.kill import digests

_FULL, _READ_ONLY = 5, 2


def can_mount(folder: Path) -> bool:
    """Whether this user may mount a file system here."""
    place = folder / "try"
    place.mkdir()
    try:
        with _mounted(place, "size=1m"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False
    finally:
        place.rmdir()


@contextmanager
def _mounted(place: Path, options: str) -> Iterator[None]:
    """A file system in memory at `place`."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", place], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True, capture_output=True)


class Disks:
    """The cases."""

    def __init__(self, work: Path, chosen: list[str]) -> None:
        self._work = work
        self._attack = Attack(work, chosen)
        self._kinds = ["limit"] + ["small", "small temporary", "read-only"] * can_mount(work)
        self.ended: Counter[str] = Counter()

    def case(self, seed: int) -> str | None:
        """Runs one. What was wrong, None where nothing was."""
        draw = random.Random(seed)
        name, kind = draw.choice(list(self._attack.commands)), draw.choice(self._kinds)
        command, reference = self._attack.commands[name], self._attack.reference(name)
        replaces, kbytes = command.force and draw.random() < 0.5, int(2 ** draw.uniform(0, 12))
        case = self._work / "case"
        shutil.rmtree(case, ignore_errors=True)
        (case / "outputs").mkdir(parents=True)
        (case / "tmp").mkdir()
        output = case / "outputs" / "out"
        words = [*self._attack.words(command, output), *["--force"] * replaces]
        older = sum(path.stat().st_size + 8192 for path in reference.older.rglob("*")) // 1024 if replaces else 0
        with self._disk(kind, case, kbytes, older):
            if replaces:
                shutil.copytree(reference.older, output)
            before = digests(output)
            if kind == "read-only":
                _remount(case / "outputs")
            code = run_command(words, case, prepare=_limit(kbytes) if kind == "limit" else lambda: None)
            said = (case / "output.txt").read_text()
            wrong = self._attack.state(command, reference, output, before) or left_behind(case)
        self.ended[f"{name} {kind}: {code}"] += 1
        wrong = wrong or _wrong_end(code, said, _READ_ONLY if kind == "read-only" else _FULL)
        return f"{name}{' --force' * replaces}, {kind}, {kbytes} kB: {wrong}" if wrong else None

    def _disk(self, kind: str, case: Path, kbytes: int, older: int) -> AbstractContextManager[None]:
        if kind == "limit":
            return _mounted_nothing()
        if kind == "small temporary":
            return _mounted(case / "tmp", f"size={kbytes + 4}k")
        return _mounted(case / "outputs", f"size={older + kbytes + 4}k" if kind == "small" else "size=64m")


@contextmanager
def _mounted_nothing() -> Iterator[None]:
    yield


def _remount(place: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", place], check=True, capture_output=True)


def _limit(kbytes: int) -> Callable[[], None]:
    return partial(resource.setrlimit, resource.RLIMIT_FSIZE, (1024 * kbytes, 1024 * kbytes))


def _wrong_end(code: int, said: str, expected: int) -> str | None:
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    if code == 0 and not errors:
        return None
    if code == expected and len(errors) == 1 and said.splitlines()[-1] == errors[0] and "/" in errors[0]:
        return None
    return f"it ended with {code}: {said[-300:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--commands", default="compile,profile,train,synth")
    options = parser.parse_args()
    end, failures, done = time.monotonic() + options.seconds, 0, 0
    import_once()
    with tempfile.TemporaryDirectory() as name:
        disks = Disks(Path(name), options.commands.split(","))
        while done < options.number and time.monotonic() < end:
            seed = options.seed + done
            wrong, done = disks.case(seed), done + 1
            if wrong is not None:
                failures += 1
                print(f"{wrong} (--number 1 --seed {seed} --commands {options.commands})", flush=True)
    ways = ", ".join(f"{count} {way}" for way, count in sorted(disks.ended.items()))
    print(f"{done} cases from seed {options.seed}: {ways}; {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
