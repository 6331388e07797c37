"""The line that is typed in a chat: edited with the standard library's readline, with a history and completion."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, ModuleType
from typing import NoReturn

from picompile.cli.chat_history import ChatHistory
from picompile.cli.chat_screen import has_colors
from picompile.errors import UsageError


class _Suspended(Exception):  # noqa: N818 (not an error)
    """Ctrl-Z was pressed at the prompt."""


class LineEditor:
    """Reads lines from a terminal. Where readline is missing, or stdout is a file, the terminal's own editing is left.

    With GNU readline a text of several lines that is pasted is one line here, which contains line breaks.
    """

    def __init__(self, history: ChatHistory, words: Sequence[str]) -> None:
        """Edit with this history, and have the tabulator complete `words` at the beginning of a line."""
        self._history, self._words = history, words
        self._last = ""
        self._readline = _load_readline()
        self._is_gnu = self._readline is not None and "GNU" in (self._readline.__doc__ or "")
        if self._readline is not None:
            self._set_up(self._readline)

    def _set_up(self, readline: ModuleType) -> None:
        readline.set_auto_history(False)
        readline.set_completer_delims(" \t\n")
        readline.set_completer(self._complete)
        readline.parse_and_bind("tab: complete" if self._is_gnu else "bind ^I rl_complete")
        if self._is_gnu:
            readline.parse_and_bind("set enable-bracketed-paste on")
        for entry in self._history.load():
            readline.add_history(entry)

    def read(self, prompt: str) -> str:
        """Return the next line. Raise EOFError at the end of the input, and `UsageError` if it is no text."""
        text = ""
        while True:
            try:
                with _suspending():
                    return self._read(prompt, text)
            except _Suspended:
                text = self._buffer()
                print(file=sys.stderr, flush=True)
                # readline has given the terminal back by now, and sets it up again afterwards.
                os.kill(os.getpid(), signal.SIGTSTP)
            except UnicodeDecodeError as error:
                raise UsageError("the line is not UTF-8 text") from error

    def add(self, entry: str) -> None:
        """Add what was typed to the history, unless it was typed just before."""
        if self._readline is None or entry == self._last:
            return
        self._last = entry
        self._readline.add_history(entry)
        self._history.append(entry)

    def has_text(self) -> bool:
        """Return whether there was text in the line when it was interrupted."""
        return bool(self._buffer())

    def _read(self, prompt: str, text: str) -> str:
        if self._readline is not None:
            self._readline.set_startup_hook(self._inserting(text) if text else None)
            # The codes for bold letters stand between others that tell readline that they have no width.
            is_bold = self._is_gnu and has_colors(sys.stdout)
            return input(f"\x01\x1b[1m\x02{prompt}\x01\x1b[0m\x02" if is_bold else prompt)
        print(prompt, end="", file=sys.stderr, flush=True)  # `input` would write it to stdout
        if not (line := sys.stdin.readline()):
            raise EOFError
        return line.removesuffix("\n")

    def _inserting(self, text: str) -> Callable[[], None]:
        def insert() -> None:
            if self._readline is not None:
                self._readline.insert_text(text)

        return insert

    def _buffer(self) -> str:
        return str(self._readline.get_line_buffer()) if self._readline is not None else ""

    def _complete(self, text: str, state: int) -> str | None:
        if self._readline is None or self._readline.get_begidx() > 0:
            return None
        found = [word for word in self._words if text and word.startswith(text)]
        return found[state] if state < len(found) else None


def _load_readline() -> ModuleType | None:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None
    with suppress(ImportError):
        import readline

        return readline
    return None


@contextmanager
def _suspending() -> Iterator[None]:
    """Raise `_Suspended` on Ctrl-Z inside the block, if the signal is not handled otherwise."""

    def suspend(number: int, frame: FrameType | None) -> NoReturn:
        raise _Suspended

    if signal.getsignal(signal.SIGTSTP) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTSTP, suspend)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
