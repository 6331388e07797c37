"""Runs one case in a forked child, so that a crash, a hang or a lost exception is a result like any other."""

from __future__ import annotations

import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """How a case ended: `word` is what it returned, or "signal", "hang" or "internal error" with `detail`."""

    word: str
    detail: str
    seconds: float

    @property
    def is_fault(self) -> bool:
        return self.word in ("signal", "hang", "internal error")


def run_case(case: Callable[[], str], limit_s: float) -> Outcome:
    """Run `case` in a child for at most `limit_s` seconds. It returns a word and, behind a newline, details."""
    reader, writer = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _run_and_exit(case, reader, writer)
    os.close(writer)
    text, hung = _read(reader, began + limit_s)
    os.close(reader)
    if hung:
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    seconds = time.monotonic() - began
    if hung:
        return Outcome("hang", f"beyond {limit_s:g} s", seconds)
    if os.WIFSIGNALED(status):
        return Outcome("signal", signal.Signals(os.WTERMSIG(status)).name, seconds)
    if os.waitstatus_to_exitcode(status) != 0 or not text:
        return Outcome("internal error", text or f"exit code {os.waitstatus_to_exitcode(status)}", seconds)
    word, _, detail = text.partition("\n")
    return Outcome(word, detail, seconds)


def _run_and_exit(case: Callable[[], str], reader: int, writer: int) -> None:
    code = 1
    try:
        os.close(reader)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        text, code = case(), 0
    except BaseException:
        text = traceback.format_exc()[-2000:]
    os.write(writer, text.encode(errors="replace")[:60_000])
    os._exit(code)


def _read(reader: int, end: float) -> tuple[str, bool]:
    """All that comes before the pipe is closed, and whether time was up first."""
    found = b""
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return found.decode(errors="replace"), True
        part = os.read(reader, 65536)
        if not part:
            return found.decode(errors="replace"), False
        found += part
