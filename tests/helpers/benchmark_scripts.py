"""Run a benchmark as a user does: `python -m benchmarks...`, in a process of its own."""

import subprocess
import sys
from collections.abc import Sequence

from benchmarks import environment


def run_benchmark(name: str, *arguments: object, codes: Sequence[int] = (0,)) -> str:
    """Run the module `name` of benchmarks, which must end with one of `codes`; return what it prints."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment())
    assert ran.returncode in codes, f"{ran.stdout}{ran.stderr}"
    return ran.stdout
