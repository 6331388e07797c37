"""Chat templates: Jinja programs that came with a model, rendered in a sandbox as transformers renders them.

Jinja's sandbox keeps a template from reading files and other objects, but not from computing for ever. So a separate
process renders it, with limited memory and time. It is started for the first chat and ends with the tokenizer.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from picompile_runtime.artifact.files import translate_system_errors
from picompile_runtime.errors import RequestError
from picompile_runtime.request_checks import shown

# A usual rendering takes less than a hundredth of each.
LIMITS = {"cpu_s": 5, "memory_bytes": 2**29, "letters": 2**22}
_PATIENCE_S = 60.0  # more than `cpu_s`, since other processes may use the processor
_WORKER = Path(__file__).with_name("template_worker.py")


class ChatTemplate:
    """A model's template. `config` is tokenizer_config.json, whose special tokens a template may use."""

    def __init__(self, template: str, config: Mapping[str, Any]) -> None:
        self._template = template
        self._tokens = {name: _content(value) for name, value in config.items() if str(name).endswith("_token")}
        self._worker: _Worker | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """Return the text of a chat.

        Raises RequestError if `messages` are not JSON objects, or the template rejects them or exceeds a limit.
        """
        try:
            content = [dict(message) for message in messages]
            request = _line({"messages": content, "add_generation_prompt": bool(add_generation_prompt)})
        except Exception as error:  # whatever json or a caller's object raises
            must = "messages must be a list of JSON objects"
            raise RequestError(f"{must}, not {shown(messages)}") from error
        while (answer := self._ready().ask(request)) is None:  # another thread's chat has ended the worker
            pass
        if "error" in answer:
            raise RequestError(f"the model's chat template rejects these messages: {answer['error']}")
        return str(answer["text"])

    def _ready(self) -> _Worker:
        worker = self._worker
        if worker is None or worker.process_id != os.getpid() or worker.has_ended:
            path = [str(entry) for entry in sys.path]
            start = {"path": path, "template": self._template, "tokens": self._tokens, "limits": LIMITS}
            with translate_system_errors("the chat template"):
                worker = self._worker = _Worker(_line(start))
        return worker


class _Worker:
    """A process that renders, started by this one. A process that is forked from this one starts its own."""

    def __init__(self, start: bytes) -> None:
        if not sys.executable:
            raise RequestError("a chat template needs a Python process of its own, and sys.executable names none")
        self.process_id = os.getpid()
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
                return {"error": f"it takes more than {LIMITS['cpu_s']} s" if by_limit else "it fails"}
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
    return json.dumps(content, default=_plain).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Return a mapping that is no dict as a dict, for JSON."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError


def _content(token: Any) -> Any:
    """Return the text of a special token, which a configuration gives as text or as an object that has it."""
    return token.get("content") if isinstance(token, Mapping) else token
