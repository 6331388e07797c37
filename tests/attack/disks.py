"""Commands that write to full and read-only disks: one line with the right exit code, and nothing lost or left.

    python tests/attack/disks.py [--number 100] [--seconds 600] [--seed 0] [--commands compile,synth]

A case draws a command, whether it replaces something, and a disk: a limit on the size of files, which works everywhere,
or, where this user may mount one, a small file system or a read-only one for the output or for temporary files. The
command must end well, or with exit code 5 (2 where nothing can be written at all) and one line of error; the output is
old or new, and nothing is beside it.
"""

import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from writers import Attack, fresh_case, left_behind, run_command

from helpers.attacks import attack, import_once, options
from helpers.digests import digests

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

    def case(self, seed: int) -> tuple[str, str | None]:
        """Run a command on a disk that is too small or read-only."""
        draw = random.Random(seed)
        name, kind = draw.choice(list(self._attack.commands)), draw.choice(self._kinds)
        command, reference = self._attack.commands[name], self._attack.reference(name)
        replaces, kbytes = command.force and draw.random() < 0.5, int(2 ** draw.uniform(0, 12))
        case = fresh_case(self._work / "case")
        output = case / "outputs" / "out"
        words = [*self._attack.words(command, output), *["--overwrite"] * replaces]
        older = sum(path.stat().st_size + 8192 for path in reference.older.rglob("*")) // 1024 if replaces else 0
        with self._disk(kind, case, kbytes, older):
            if replaces:
                shutil.copytree(reference.older, output)
            before = digests(output)
            if kind == "read-only":
                subprocess.run(["mount", "-o", "remount,ro", case / "outputs"], check=True, capture_output=True)
            code = run_command(words, case, most_bytes=1024 * kbytes if kind == "limit" else None)
            said = (case / "output.txt").read_text()
            wrong = self._attack.state(command, reference, output, before) or left_behind(case)
        wrong = wrong or _wrong_end(code, said, _READ_ONLY if kind == "read-only" else _FULL)
        told = f"{name}{' --overwrite' * replaces}, {kind}, {kbytes} kB: {wrong}"
        return f"{name} {kind}: {code}", told if wrong else None

    def _disk(self, kind: str, case: Path, kbytes: int, older: int) -> AbstractContextManager[None]:
        if kind == "limit":
            return nullcontext()
        if kind == "small temporary":
            return _mounted(case / "tmp", f"size={kbytes + 4}k")
        return _mounted(case / "outputs", f"size={older + kbytes + 4}k" if kind == "small" else "size=64m")


def _wrong_end(code: int, said: str, expected: int) -> str | None:
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    if code == 0 and not errors:
        return None
    if code == expected and len(errors) == 1 and said.splitlines()[-1] == errors[0] and "/" in errors[0]:
        return None
    return f"it ended with {code}: {said[-300:]}"


def main() -> int:
    found = options(__doc__, 100, commands="compile,profile,train,synth")
    import_once()
    with tempfile.TemporaryDirectory() as name:
        disks = Disks(Path(name), found.commands.split(","))
        return 1 if attack(disks.case, found.number, found.seconds, found.seed).failures else 0


if __name__ == "__main__":
    sys.exit(main())
