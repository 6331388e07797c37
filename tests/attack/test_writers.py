"""A share of the attacks on commands that write, in a process that has computed nothing before it forks."""

import subprocess
import sys

import pytest

from helpers.support import ROOT

pytestmark = pytest.mark.slow("kills commands that write and fills disks, again and again")


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("writers.py", ["--number", "5", "--commands", "synth"]),
        ("disks.py", ["--number", "5", "--commands", "synth"]),
        ("caches.py", ["--number", "12"]),
    ],
)
def test_nothing_is_lost_and_nothing_left(script: str, arguments: list[str]) -> None:
    command = [sys.executable, ROOT / "tests" / "attack" / script, "--seed", "1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("0 failures\n")
