"""Kernels that failed, once more under NVIDIA's compute-sanitizer, which says where they read or write wrongly."""

import os
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from benchmarks import environment
from benchmarks.gpu import MODULE

_PROGRAM = "compute-sanitizer"
_TOOLS = ("memcheck", "racecheck")
# Seconds of one run, and of all of them.
_MOST_CASES, _LIMIT_S, _ALL_S = 3, 30.0, 60.0
# A run that has less left than this goes on with what it has to measure.
_LEAST_S = 10.0
_MOST_CHARACTERS = 4000


def sanitize(rows: Sequence[dict[str, Any]], options: Namespace, deadline_s: float) -> None:
    """Add `sanitizer`, the output by tool, to the first of `rows`, kernels, that are wrong.

    Does nothing where there is no compute-sanitizer, and stops at `deadline_s` of the monotonic clock.
    """
    program, deadline_s = shutil.which(_PROGRAM), min(deadline_s, time.monotonic() + _ALL_S)
    wrong = {row["label"]: row for row in reversed(rows) if row["is_right"] is False}
    if program is None:
        return
    # Races after all wrong accesses, which are the more likely.
    for tool in _TOOLS:
        for label, row in list(reversed(wrong.items()))[:_MOST_CASES]:
            left_s = deadline_s - time.monotonic()
            if left_s < _LEAST_S:
                return
            text = _output(program, tool, label, options, min(_LIMIT_S, left_s))
            row["sanitizer"] = row.get("sanitizer", {}) | {tool: text}


def _output(program: str, tool: str, label: str, options: Namespace, limit_s: float) -> str:
    """The end of what one tool says of one kernel."""
    command = [program, "--tool", tool, "--target-processes", "all", sys.executable, "-m", MODULE, "case"]
    command += [str(options.pack), label, "--work", f"{options.work}.sanitizer"]
    command += ["--device-library", options.device_library] if options.device_library else []
    # In a session of its own, so that what it has started ends with it.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=environment(PYTHONUNBUFFERED="1"),
    )
    try:
        text, note = process.communicate(timeout=limit_s)[0], ""
    except subprocess.TimeoutExpired:
        _end(process)
        text, note = process.communicate()[0], f"\nended after {limit_s:.0f} s"
    finally:  # also where this run is terminated
        _end(process)
        shutil.rmtree(f"{options.work}.sanitizer", ignore_errors=True)
    return (text + note).strip()[-_MOST_CHARACTERS:]


def _end(process: "subprocess.Popen[str]") -> None:
    """End a process with all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
