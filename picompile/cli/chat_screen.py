"""Where a chat is shown: answers go to stdout, everything else to stderr."""

import os
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from picompile_runtime.sampling.chat_answer import ChatAnswer

_DIM, _RED, _PLAIN, _ERASE_LINE = "\x1b[2m", "\x1b[31m", "\x1b[0m", "\r\x1b[K"
# Reading a prompt for less time than this shows no progress.
_PATIENCE_S = 0.5
# A model may write codes that change how a terminal works. Line breaks and tabs do not.
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def has_colors(stream: TextIO) -> bool:
    """Return whether a stream shows colors: a terminal that has them, unless the user wants none (NO_COLOR)."""
    return _has_codes(stream) and not os.environ.get("NO_COLOR")


def _has_codes(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def say(text: str) -> None:
    """Show one line of status."""
    _write(f"{_colored(text, _DIM)}\n")


def say_error(text: str) -> None:
    """Show one line about what went wrong."""
    _write(f"{_colored(f'error: {text}', _RED)}\n")


def _colored(text: str, color: str) -> str:
    return f"{color}{text}{_PLAIN}" if text and has_colors(sys.stderr) else text


def _write(text: str) -> None:
    with suppress(OSError):  # a log that takes no more is no reason to end
        sys.stderr.write(text)
        sys.stderr.flush()


def write_answer(answer: "ChatAnswer") -> None:
    """Write an answer as it is made, without white space before it and with a line break behind it."""
    clean = sys.stdout.isatty()
    start_s, last, is_waiting = time.monotonic(), "", False
    try:
        for piece in answer:
            text = piece if last else piece.lstrip()
            if text:
                if is_waiting:
                    _show_progress("")
                    is_waiting = False
                sys.stdout.write(text.translate(_CONTROLS) if clean else text)
                sys.stdout.flush()
                last = text[-1]
            elif not answer.text and time.monotonic() - start_s > _PATIENCE_S:
                is_waiting = True
                _show_progress(f"reading: {answer.read_tokens} of {len(answer.prompt_tokens)} tokens")
    finally:
        if is_waiting:
            _show_progress("")
        if last not in ("", "\n"):
            sys.stdout.write("\n")
        sys.stdout.flush()


def _show_progress(text: str) -> None:
    """Replace the line of progress, which only a terminal has."""
    if _has_codes(sys.stderr):
        _write(f"{_ERASE_LINE}{_colored(text, _DIM)}")


@contextmanager
def restored_terminal() -> Iterator[list[Any] | None]:
    """Restore the modes of the terminal behind stdin at the end of the block; yield them, or None without one."""
    try:
        before = termios.tcgetattr(sys.stdin)
    except (termios.error, OSError, ValueError):  # no terminal
        yield None
        return
    try:
        yield before
    finally:
        with suppress(termios.error):  # the terminal has gone
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


@contextmanager
def silent_keys() -> Iterator[None]:
    """Keep keys that are pressed inside the block from appearing in the text; the next prompt has them."""
    with restored_terminal() as before:
        if before is not None:
            silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
            termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
        yield
