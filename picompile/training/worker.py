"""A worker process: trains layers, one after another, on one thread.

It reads a JSON object a line, `{"data": path, "result": path, "settings": {...}}`, and answers each with one. It ends
with its input, or when the process that started it has ended. Imports neither transformers nor a compiler, so it starts
quickly and stays small.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from picompile.training.candidates import JobSettings
from picompile.training.jobs import run_job


def main() -> None:
    """Answers jobs until there are no more."""
    # Ctrl-C reaches the whole group; whoever started this process ends it then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    try:
        run_job(Path(job["data"]), Path(job["result"]), JobSettings(**job["settings"]))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "exit_code": getattr(error, "exit_code", 1)}
    return {}


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    main()
