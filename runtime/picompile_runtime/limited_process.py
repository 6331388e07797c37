"""A process of its own for programs of strangers, such as chat templates and grammars: they may run for ever, take all
memory, or end the process that runs them. It is started for the first request, with limits, and ends with its owner.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from picompile_runtime.artifact.files import translate_system_errors
from picompile_runtime.errors import RequestError

_PATIENCE_S = 60.0  # more than any `cpu_s`, since other processes may use the processor
_WORKER = Path(__file__).with_name("limited_worker.py")


class LimitedProcess:
    """Answers requests in a process under limits, which is started again when it has ended. Threads may share it."""

    def __init__(self, what: str, handler: Path, start: Mapping[str, Any], limits: Mapping[str, int]) -> None:
        """Make it; the process starts with the first request.

        Args:
            what: what errors call the process's work.
            handler: a file whose function `handler` takes `start` and returns what answers requests.
            start: what the handler needs, as JSON has it.
            limits: `cpu_s`, processor time for each request; `memory_bytes`, address space; and those of the handler.
        """
        self._what, self._handler, self._start, self._limits = what, handler, start, limits
        self._running: _Running | None = None

    def ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the answer to a request; it has an `error`, one line, if the work fails or exceeds a limit.

        Raises what `json` raises if the request is no JSON, and RequestError if no process can be started.
        """
        line = _line(request)
        while (answer := self._ready().ask(line)) is None:  # another thread's request has ended the process
            pass
        return answer

    def close(self) -> None:
        """End the process, if there is one; a later request starts another."""
        if self._running is not None:
            self._running.close()

    def _ready(self) -> _Running:
        running = self._running
        if running is None or running.process_id != os.getpid() or running.has_ended:
            path = [str(entry) for entry in sys.path]
            start = {"path": path, "handler": str(self._handler), "limits": self._limits, **self._start}
            with translate_system_errors(self._what):
                running = self._running = _Running(self._what, _line(start), self._limits)
        return running


class _Running:
    """The process, started by this one. A process that is forked from this one starts its own."""

    def __init__(self, what: str, start: bytes, limits: Mapping[str, int]) -> None:
        if not sys.executable:
            raise RequestError(f"{what} needs a Python process of its own, and sys.executable names none")
        self.process_id = os.getpid()
        self._limits = limits
        self._lock = threading.Lock()
        command = [sys.executable, "-I", "-S", str(_WORKER)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        self._end = weakref.finalize(self, _end, self._process, self.process_id)
        self._unsent = start

    @property
    def has_ended(self) -> bool:
        """Whether the process can answer no more requests."""
        return not self._end.alive or self._process.poll() is not None

    def close(self) -> None:
        """End the process, after the request that it answers."""
        with self._lock:
            self._end()

    def ask(self, request: bytes) -> Mapping[str, Any] | None:
        """Return the answer to a request, None if the process had ended. An error or an interrupt ends the process."""
        with self._lock:
            if self.has_ended:
                return None
            try:
                answer = self._ask(request)
            except BaseException:
                self._end()
                raise
            if "error" in answer and not answer["error"]:
                self._end()
                by_limit = self._process.returncode == -signal.SIGXCPU
                return {"error": f"it takes more than {self._limits['cpu_s']} s" if by_limit else "it fails"}
            return answer

    def _ask(self, request: bytes) -> Mapping[str, Any]:
        """Return the process's answer, with an empty error if it gives none."""
        unsent, self._unsent = self._unsent + request, b""
        try:
            _write(self._process.stdin, unsent)
            answer = _read_line(self._process.stdout)
        except BrokenPipeError:
            answer = b""
        return json.loads(answer) if answer.endswith(b"\n") else {"error": ""}


def _write(pipe: IO[bytes] | None, data: bytes) -> None:
    rest = memoryview(data)
    while pipe is not None and rest:
        rest = rest[os.write(pipe.fileno(), rest) :]


def _read_line(pipe: IO[bytes] | None) -> bytes:
    """Return a line, or what there is of one when the pipe ends or time is up."""
    if pipe is None:
        return b""
    ready, parts, end = select.poll(), [b""], time.monotonic() + _PATIENCE_S
    ready.register(pipe, select.POLLIN)
    while not parts[-1].endswith(b"\n") and ready.poll(max(0.0, 1e3 * (end - time.monotonic()))):
        parts.append(os.read(pipe.fileno(), 2**20))
        if not parts[-1]:
            break
    return b"".join(parts)


def _end(process: subprocess.Popen[bytes], process_id: int) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    if os.getpid() == process_id:
        process.kill()
        process.wait()


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"
