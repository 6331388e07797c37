"""Kills a command at random moments, lets it go on, and compares what it made with what it makes undisturbed.

    python tests/helpers/kill.py --moments 20 build/kill profile models/tiny-reglu -o FOLDER --calibration README.md

runs `picompile profile …` once undisturbed and 20 times with one kill each, with a folder in place of the word FOLDER.
The folder is new each time, and what is compared are the bytes of every file in it. Moments are drawn from the time in
which the folder is there; imports before that are waited for. Prints a line for each moment; ends with 1 where
something differs.
"""

import argparse
import hashlib
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.002


@dataclass(frozen=True)
class Killed:
    """One moment: seconds after the folder appeared; whether the kill was in time; how many files were there then;
    whether the bytes are the same in the end.
    """

    after_s: float
    in_time: bool
    files: int
    same: bool


def kill_at_random_moments(
    command: Sequence[str], work: Path, moments: int, seed: int, together: bool = False
) -> list[Killed]:
    """Runs `picompile` with the words `command`; `FOLDER` among them stands for a folder under `work`.

    With `together` one run is killed again and again; else each is killed once.
    """
    _import_once()
    draw = random.Random(seed)
    reference = work / "reference"
    appeared_s, ended_s = _watch(_start(command, reference), reference)
    expected = digests(reference)
    found, same = [], True
    for number in range(moments):
        folder = work / ("killed" if together else f"killed-{number}")
        after_s = draw.uniform(0, ended_s - appeared_s)
        in_time = _kill(_start(command, folder), folder, after_s)
        files = len(digests(folder))
        if not together or number + 1 == moments:
            _watch(_start(command, folder), folder)
            same = digests(folder) == expected
            shutil.rmtree(folder)
        found.append(Killed(after_s, in_time, files, same))
    return found


def digests(folder: Path) -> dict[str, str]:
    """The sha256 of every file in a folder, by its path there."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def _import_once() -> None:
    """Import what takes seconds. Nothing is computed here: torch's threads would not outlive the fork."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    import picompile.cli.app
    import picompile.predictors.profile  # noqa: F401


def _start(command: Sequence[str], folder: Path) -> int:
    """A child process, in a process group of its own, that runs the command."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        from picompile.cli import main

        output = os.open(folder.parent / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = main([str(folder) if word == "FOLDER" else word for word in command])
        sys.stdout.flush()
    finally:
        os._exit(code)


def _watch(child: int, folder: Path) -> tuple[float, float]:
    """Waits for the child; seconds until `folder` appeared, and until it ended, which must be well."""
    started, appeared = time.monotonic(), 0.0
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        appeared = appeared or (time.monotonic() - started if folder.exists() else 0.0)
        if pid:
            break
        time.sleep(_POLL_S)
    if status:
        raise RuntimeError(
            f"the command ended with {os.waitstatus_to_exitcode(status)}: see {folder.parent}/output.txt"
        )
    return appeared, time.monotonic() - started


def _kill(child: int, folder: Path, after_s: float) -> bool:
    """Kills the child and its children so long after the folder appeared; says whether it had not ended by then."""
    while not folder.exists():
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(_POLL_S)
    end = time.monotonic() + after_s
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(_POLL_S)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--together", action="store_true", help="kill one run at all moments, not one at each")
    parser.add_argument("work", type=Path, help="a folder for all that is made; it must not exist")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what comes after `picompile`, with FOLDER in it")
    options = parser.parse_args()
    if "FOLDER" not in options.command:
        parser.error("the word FOLDER must be in the command")
    options.work.mkdir(parents=True)
    found = kill_at_random_moments(options.command, options.work, options.moments, options.seed, options.together)
    for killed in found:
        state = "killed" if killed.in_time else "had ended"
        verdict = "same bytes" if killed.same else "OTHER BYTES"
        print(f"{killed.after_s:7.3f} s: {state}, {killed.files} files; then {verdict}")
    print(f"seed {options.seed}: {sum(killed.same for killed in found)} of {len(found)} the same")
    sys.exit(0 if all(killed.same for killed in found) else 1)


if __name__ == "__main__":
    main()
