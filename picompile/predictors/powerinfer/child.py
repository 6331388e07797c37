"""The guarded process: `python -m picompile.predictors.powerinfer.child` with a request on standard input.

It reads untrusted files with libraries that were not made for that. If it hangs or takes too much memory, its limits
end it. It writes tensors to a safetensors file, or the reason of a rejection to a text file; the parent reads nothing
else.
"""

import errno
import json
import math
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from picompile.predictors.powerinfer.handover import DISK_FULL, REFUSAL_FILE, REFUSED, TENSORS_FILE, RefusedError
from picompile.processes import end_with_parent

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# Time between SIGXCPU, which tells the parent which limit it was, and SIGKILL.
_GRACE_S = 2


def main() -> int:
    """Read the requested files. Return the exit code: 0, `DISK_FULL`, or `REFUSED` if a reason was written."""
    request = json.load(sys.stdin)
    end_with_parent(request["parent"])
    output = Path(request["output"])
    # The libraries are imported before the limits apply: they are trusted, and some are large.
    read = _readers(request)
    _limit(**request["limits"])
    try:
        parts = [part for reader in read for part in reader()]
        from picompile.predictors.powerinfer.handover import write_parts

        write_parts(output / TENSORS_FILE, parts)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            return DISK_FULL
        (output / REFUSAL_FILE).write_text(_explain(error), encoding="utf-8", errors="replace")
        return REFUSED
    return 0


def _readers(request: Mapping[str, Any]) -> list[Callable[[], Any]]:
    readers: list[Callable[[], Any]] = []
    if request["gguf"]:
        from picompile.predictors.powerinfer.child_gguf import read_gguf

        readers.append(lambda: read_gguf(**request["gguf"]))
    if request["files"] or request["activations"]:
        from picompile.predictors.powerinfer.child_torch import read_activations, read_files

        readers.append(lambda: read_files(request["files"]))
        readers.append(lambda: read_activations(request["activations"]))
    return readers


def _limit(memory_bytes: int, cpu_s: float, file_bytes: int) -> None:
    """Limit the rest of the process: memory and time beyond what it has used, and the size of a file."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        mapped_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    cpu_limit_s = math.ceil(time.process_time() + cpu_s)
    _set_limit(resource.RLIMIT_AS, mapped_bytes + memory_bytes)
    _set_limit(resource.RLIMIT_CPU, cpu_limit_s, _GRACE_S)
    _set_limit(resource.RLIMIT_FSIZE, file_bytes)
    _set_limit(resource.RLIMIT_CORE, 0)


def _set_limit(which: int, limit: int, grace: int = 0) -> None:
    highest = resource.getrlimit(which)[1]
    soft, hard = limit, limit + grace
    if highest != resource.RLIM_INFINITY:
        soft, hard = min(soft, highest), min(hard, highest)
    resource.setrlimit(which, (soft, hard))


def _explain(error: Exception) -> str:
    if isinstance(error, RefusedError):
        return str(error)
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "reading it takes more memory than its size explains"
    return f"cannot be read: {type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
