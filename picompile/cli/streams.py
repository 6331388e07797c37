"""Standard input, output and error, where whoever started the process closed some of them (`>&-`)."""

import os
import sys
from contextlib import suppress

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def complete_streams() -> None:
    """Opens those that are closed as /dev/null.

    Python has none for them, and the next files that are opened would get their numbers: what a library writes to
    number 1 would go into an artifact.
    """
    for number, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is not None:
            continue
        handle = os.open(os.devnull, os.O_RDWR)
        if handle != number and not _is_open(number):
            os.dup2(handle, number)
            os.close(handle)
            handle = number
        setattr(sys, name, open(handle, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 (stays open)


def silence_stdout() -> None:
    """Lets nothing more be written: Python flushes stdout once more as it ends, and that would fail again."""
    with suppress(OSError, ValueError):  # not a real file, as under a test
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
