"""A worker process: trains layers, one after another, on one thread.

It reads a JSON object a line, `{"data": path, "result": path, "settings": {...}}`, and answers each with one. It ends
with its input, or when the process that started it has ended. Imports neither transformers nor a compiler, so it starts
quickly and stays small.
"""

import json
import signal
import sys
from pathlib import Path
from typing import Any

from picompile.predictors.train.candidates import JobSettings, run_job


def main() -> None:
    """Answers jobs until there are no more."""
    # These reach the whole group, or all processes of a service; whoever started this one ends it then.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    try:
        run_job(Path(job["data"]), Path(job["result"]), JobSettings(**job["settings"]))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "exit_code": getattr(error, "exit_code", 1)}
    return {}
