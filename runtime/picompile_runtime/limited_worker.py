"""The process that works for another one under limits; see limited_process.py. It imports nothing of this package.

The first line of its input is a JSON object with `path` (Python's), `handler` (a file), `limits`, and what the handler
needs. Each later line is a request; the process answers with a line: what the handler returns, or an `error`.
"""

import json
import math
import resource
import runpy
import signal
import sys
from typing import Any


def _allow(cpu_s: int) -> None:
    """Allow the process `cpu_s` more seconds of processor time; after that the system ends it by SIGXCPU."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + cpu_s)


def _limit(kind: int, most: int) -> None:
    """Lower a limit of this process. A lower limit that the user has set stays."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main() -> None:
    """Answer requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all its processes
    start = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = start["path"]
    limits = start["limits"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(resource.RLIMIT_AS, limits["memory_bytes"])
    handle: Any = None
    while line := sys.stdin.buffer.readline():
        _allow(limits["cpu_s"])
        try:
            handle = handle or runpy.run_path(start["handler"])["handler"](start)
            answer = handle(json.loads(line))
        except MemoryError:
            answer = {"error": f"it takes more than {limits['memory_bytes'] >> 20} MiB of memory"}
        except Exception as error:  # a stranger's program can fail in any way
            answer = {"error": " ".join(str(error).split())[:1000] or type(error).__name__}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
