"""Ctrl-C in a chat: it stops an answer gently, and clears a line at the prompt."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class ChatInterrupt(KeyboardInterrupt):
    """Ctrl-C was pressed, and no answer was there to be stopped. Signals that end the process raise others."""


class ChatInterrupts:
    """Decides what Ctrl-C does now."""

    def __init__(self) -> None:
        self._stop: Callable[[], None] | None = None

    @contextmanager
    def calling(self, stop: Callable[[], None]) -> Iterator[None]:
        """Have the first Ctrl-C inside the block call `stop`. One more raises `ChatInterrupt`: `stop` took too long."""
        self._stop = stop
        try:
            yield
        finally:
            self._stop = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        stop, self._stop = self._stop, None
        if stop is None:
            raise ChatInterrupt
        stop()

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Handle Ctrl-C inside the block, unless it is ignored, or this is not the main thread."""
        before = signal.getsignal(signal.SIGINT)
        if before == signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
            yield
            return
        signal.signal(signal.SIGINT, self.handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
