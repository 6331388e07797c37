"""Stacks of a child process that hung or crashed, in a file that its parent reads."""

import faulthandler
import os
import signal
import time
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

# Stacks are written so long before the parent loses its patience.
_EARLIER_SHARE = 0.1
# Characters of a long text that are kept: its end has the error.
MOST_CHARACTERS = 8000
_SIGNAL = signal.SIGUSR1
# The file begins with this while a unit is done.
_BEGUN = "a unit has begun\n"
# Seconds that a process has to write its stacks.
_WRITING_S = 0.5


class Watch:
    """In the child: writes all stacks into a file, before a unit's time is over, at a crash, and when asked to."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        faulthandler.enable(self._file)
        faulthandler.register(_SIGNAL, self._file)

    def begin(self, limit_s: float) -> None:
        """Begin to wait for a unit."""
        faulthandler.cancel_dump_traceback_later()
        self._file.seek(0)
        self._file.truncate()
        self._file.write(_BEGUN)
        self._file.flush()
        faulthandler.dump_traceback_later(limit_s * (1 - _EARLIER_SHARE), file=self._file)

    def end(self) -> None:
        """Stop to wait for a unit."""
        faulthandler.cancel_dump_traceback_later()
        self._file.seek(0)
        self._file.truncate()


def ask(process: BaseProcess) -> None:
    """Ask a child that has a `Watch` for its stacks; one that is no more, or cannot answer, is left alone."""
    if process.pid is not None and process.is_alive():
        with suppress(OSError):
            os.kill(process.pid, _SIGNAL)
        time.sleep(_WRITING_S)


def has_begun(path: Path) -> bool:
    """Whether a child is at a unit, and no longer importing."""
    return _text(path).startswith(_BEGUN)


def stacks(path: Path) -> str:
    """Return what a child has written, and remove the file; empty where there is nothing."""
    text = _text(path).removeprefix(_BEGUN).strip()
    path.unlink(missing_ok=True)
    return text[-MOST_CHARACTERS:]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def ending(exit_code: int | None) -> str:
    """Tell in a line how a process ended."""
    text = f"the process ended with {exit_code}"
    if exit_code is None or exit_code >= 0:
        return text
    with suppress(ValueError):
        text += f" ({signal.Signals(-exit_code).name})"
    return f"{text}: the system may have run out of memory" if exit_code == -signal.SIGKILL else text
