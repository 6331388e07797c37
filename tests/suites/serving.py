"""A server of ours in a process of its own, for suites that run in another virtual environment."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SERVER_PYTHON = Path(__file__).parents[2] / ".venv/bin/python"


@contextmanager
def serving(*arguments: object, python: str | Path = SERVER_PYTHON, log: Path | None = None) -> Iterator[str]:
    """Start a server, and yield its address when it serves. What it writes goes to `log`."""
    command = [python, "-m", "picompile_runtime.serving", *arguments]
    if "--port" not in arguments:
        command += ["--port", "0"]
    process = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True, errors="replace")
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"^serving .* at (http://\S+)", line):
                break
        else:
            raise RuntimeError(f"the server did not start: {process.wait()}")
        with (log or Path("/dev/null")).open("w", encoding="utf-8") as sink:
            rest = subprocess.Popen(["cat"], stdin=process.stderr, stdout=sink)
        yield found[1]
        rest.terminate()
    finally:
        process.terminate()
        process.wait()
