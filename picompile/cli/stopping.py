"""Signals that ask a command to end: it takes away what it has begun, as on Ctrl-C, and ends."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Of `docker stop`, systemd and batch systems, and of a terminal that is closed.
_ASKED = (signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal other than Ctrl-C asked the process to end. Whatever handles that one handles this too."""


@contextmanager
def stoppable() -> Iterator[list[int]]:
    """Has SIGTERM and SIGHUP raise `Stopped` inside the block; yields the numbers of signals that came, Ctrl-C too.

    A signal that is ignored stays so: `nohup` and shells ignore some for their children. Elsewhere than in the main
    thread, where Python lets nobody set handlers, it changes nothing.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def stop(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt if number == signal.SIGINT else Stopped

    before = {number: signal.getsignal(number) for number in (*_ASKED, signal.SIGINT)}
    mine = [number for number, handler in before.items() if handler in (signal.SIG_DFL, signal.default_int_handler)]
    try:
        for number in mine:
            signal.signal(number, stop)
        yield came
    finally:
        for number in mine:
            signal.signal(number, before[number])
