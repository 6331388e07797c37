"""The guarded process: `python -m picompile.predictors.powerinfer.child` with a request on standard input.

It reads pickles of strangers, with a library that was not made for that. If it takes too much memory or time, its
limits or the parent end it. It writes tensors to a safetensors file, or the reason of a rejection to a text file; the
parent reads nothing else.
"""

import errno
import json
import resource
import sys
from pathlib import Path

from picompile.predictors.powerinfer.child_torch import read_activations, read_files
from picompile.predictors.powerinfer.handover import (
    DISK_FULL,
    REFUSAL_FILE,
    REFUSED,
    TENSORS_FILE,
    RefusedError,
    write_parts,
)
from picompile.processes import end_with_parent

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def main() -> int:
    """Read the requested files. Return the exit code: 0, `DISK_FULL`, or `REFUSED` if a reason was written."""
    request = json.load(sys.stdin)
    end_with_parent(request["parent"])
    output = Path(request["output"])
    # Limits do not count the libraries, which were imported before: they are trusted, and large.
    _limit(**request["limits"])
    try:
        parts = [*read_files(request["files"]), *read_activations(request["activations"])]
        write_parts(output / TENSORS_FILE, parts)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            return DISK_FULL
        (output / REFUSAL_FILE).write_text(_explain(error), encoding="utf-8", errors="replace")
        return REFUSED
    return 0


def _limit(memory_bytes: int, file_bytes: int) -> None:
    """Limit the rest of the process: memory beyond what it has used, and the size of a file."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        mapped_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    _set_limit(resource.RLIMIT_AS, mapped_bytes + memory_bytes)
    _set_limit(resource.RLIMIT_FSIZE, file_bytes)
    _set_limit(resource.RLIMIT_CORE, 0)


def _set_limit(which: int, limit: int) -> None:
    highest = resource.getrlimit(which)[1]
    limit = limit if highest == resource.RLIM_INFINITY else min(limit, highest)
    resource.setrlimit(which, (limit, limit))


def _explain(error: Exception) -> str:
    if isinstance(error, RefusedError):
        return str(error)
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "reading it takes more memory than its size explains"
    return f"cannot be read: {type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
