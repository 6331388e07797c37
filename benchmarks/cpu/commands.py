"""Run picompile as a user does."""

import json
import subprocess
import sys
from typing import Any


def picompile(*arguments: object) -> str:
    """Runs the command line; returns its standard output. Stops the benchmark when it fails."""
    command = [sys.executable, "-m", "picompile", *map(str, arguments)]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if finished.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {finished.returncode}")
    return finished.stdout


def picompile_json(*arguments: object) -> dict[str, Any]:
    """Run picompile with `--json`, and return its output."""
    result: dict[str, Any] = json.loads(picompile(*arguments, "--json"))
    return result
