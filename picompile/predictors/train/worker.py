"""A worker process that trains layers one after another, on one thread.

It reads one JSON object per line, `{"data": path, "result": path, "settings": {...}}`, and answers each with one. It
ends when its input ends, or when the process that started it has ended. It imports neither transformers nor a compiler,
so that it starts quickly and stays small.
"""

import json
import signal
import sys
from pathlib import Path
from typing import Any

from picompile.predictors.train.candidates import run_job
from picompile.predictors.train.fit import JobSettings


def main() -> None:
    """Answer jobs until there are no more."""
    # These signals reach the whole process group or service; the process that started this one then ends it.
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
