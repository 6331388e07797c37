"""A command on a terminal of its own: what it shows is read, and keys are typed."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# The terminal becomes that of the process, so that Ctrl-C and Ctrl-Z are signals.
# A process whose parent ignores SIGINT, as in the background of a script, would ignore it, too.
_START = """
import fcntl, signal, sys, termios
signal.signal(signal.SIGINT, signal.default_int_handler)
fcntl.ioctl(sys.stdin, termios.TIOCSCTTY, 0)
from picompile.cli import main
sys.exit(main(sys.argv[1:]))
"""
_PATIENCE_S = 60.0  # far more than anything takes
_MOST_LETTERS = 2000  # in an error
CTRL_C, CTRL_D, CTRL_Z, UP = "\x03", "\x04", "\x1a", "\x1b[A"


# Codes that move the cursor or set a mode, and the beginning of one at the end.
_CODE = re.compile(r"\x1b(\[[0-?]*[ -/]*([@-~]|$)|$)")


class Terminal:
    """The terminal of a running command. `shown` is what it got, without codes and carriage returns."""

    def __init__(self, handle: int, process: subprocess.Popen[bytes]) -> None:
        self._handle, self.process = handle, process
        self.raw = self.shown = ""
        self._place = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def type(self, keys: str) -> None:
        os.write(self._handle, keys.encode())

    def press(self, key: str) -> None:
        """Type a key that is a signal, when the process waits for keys.

        Python's readline overlooks signals that come between two keys while it is not waiting, until the next one.
        """
        self.wait_until_idle()
        self.type(key)

    def wait_until_idle(self) -> None:
        """Wait until the process sleeps, as it does where it waits for keys."""
        end_s = time.monotonic() + _PATIENCE_S
        stat = Path(f"/proc/{self.process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "S":
            assert time.monotonic() < end_s, "the process is never idle"
            time.sleep(0.001)

    def wait_for(self, text: str) -> str:
        """Read until `text` is shown behind what was waited for before, and return what was shown up to there."""
        end_s = time.monotonic() + _PATIENCE_S
        while (found := self.shown.find(text, self._place)) < 0:
            assert time.monotonic() < end_s and self._read(), (
                f"{text!r} is not in {self.shown[self._place :][-_MOST_LETTERS:]!r}"
            )
        before, self._place = self.shown[self._place : found], found + len(text)
        return before

    def wait_for_prompt(self, prompt: str = "> ") -> str:
        """Wait for a line that begins with the prompt: keys before it would be typed into nothing."""
        return self.wait_for(f"\n{prompt}")

    def enter(self, text: str, prompt: str = "> ") -> None:
        """Type a line at the next prompt."""
        self.wait_for_prompt(prompt)
        self.type(f"{text}\r")

    def end(self) -> int:
        """End the input at the next prompt, and return the exit code."""
        self.wait_for_prompt()
        self.type(CTRL_D)
        return self.wait()

    def wait(self) -> int:
        """Read to the end of the command, and return its exit code."""
        while self._read():
            pass
        return self.process.wait(_PATIENCE_S)

    def echoes(self) -> bool:
        """Whether the terminal shows what is typed."""
        return bool(termios.tcgetattr(self._handle)[3] & termios.ECHO)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._handle], [], [], _PATIENCE_S)
        assert ready, f"nothing more is shown after {self.shown[-_MOST_LETTERS:]!r}"
        try:
            data = os.read(self._handle, 2**16)
        except OSError:  # the command has ended
            return False
        self.raw += self._decoder.decode(data)
        self.shown = _CODE.sub("", self.raw).replace("\r", "")
        return bool(data)


@contextmanager
def terminal(
    *arguments: object, environment: Mapping[str, str] | None = None, stdout: Path | None = None
) -> Iterator[Terminal]:
    """Start `picompile` with these arguments on a terminal of 100 columns, and end it with the block."""
    handle, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    variables = {**os.environ, "TERM": "xterm", "NO_COLOR": "1", "PYTHONUTF8": "1", **(environment or {})}
    variables["INPUTRC"] = os.devnull
    command = [sys.executable, "-c", _START, *map(str, arguments)]
    with stdout.open("wb") if stdout else os.fdopen(os.dup(other), "wb") as out:
        process = subprocess.Popen(
            command, stdin=other, stdout=out, stderr=other, start_new_session=True, env=variables
        )
    os.close(other)
    try:
        yield Terminal(handle, process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(_PATIENCE_S)
        os.close(handle)
