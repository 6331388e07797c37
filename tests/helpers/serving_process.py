"""`picompile-serve` in a process of its own, and applications on a thread."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from helpers.chat_templates import CHATML
from helpers.support import BuildOnce, compile_for_test, save_tiny_llama
from picompile_server.http.protocol import WatchfulProtocol
from picompile_server.http.server import bind

_PATIENCE_S = 60.0


def build_serving_artifact(build_once: BuildOnce) -> Path:
    """Compile a model of random weights, with a token for each byte, for four sequences of 1024 tokens."""

    def make(folder: Path) -> None:
        model = folder.with_name("serving-model")
        save_tiny_llama(model, max_position_embeddings=1024)
        compile_for_test(model, folder, quant="f16", context=1024, sequences=4)

    return build_once("serving-artifact", make)


def build_chat_artifact(build_once: BuildOnce) -> Path:
    """Compile such a model with a chat template, and room for what agents write into a prompt."""

    def make(folder: Path) -> None:
        model = folder.with_name("chat-model")
        save_tiny_llama(model, max_position_embeddings=8192)
        (model / "chat_template.jinja").write_text(CHATML)
        compile_for_test(model, folder, quant="f16", context=8192, sequences=4)

    return build_once("chat-artifact", make)


@dataclass
class ServingProcess:
    """The process and where it listens.

    Attributes:
        log: what it writes to stderr. A file: a pipe that nobody reads would stop it.
        url: known when it has begun to load its models.
    """

    process: subprocess.Popen[bytes]
    log: Path
    url: str = ""

    @property
    def lines(self) -> list[str]:
        """What it has written to stderr, in whole lines."""
        return self.log.read_text(encoding="utf-8", errors="replace").rpartition("\n")[0].splitlines()

    def wait_for(self, beginning: str) -> str:
        """Wait for a line with this beginning, and return it."""
        end = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end:
            has_ended = self.process.poll() is not None
            for line in self.lines:
                if line.startswith(beginning):
                    return line
            if has_ended:
                break
            time.sleep(0.02)
        raise AssertionError(f"the server did not write {beginning!r}: {self.lines}")

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, and return the exit code."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        return self.process.wait(_PATIENCE_S)


@contextmanager
def serving(*arguments: object, wait: bool = True, **environment: str) -> Iterator[ServingProcess]:
    """Start the command at a free port with one thread. Unless `wait` is False, wait until it serves."""
    command = [sys.executable, "-m", "picompile_server", "--port", "0", "-t", "1", *map(str, arguments)]
    with tempfile.NamedTemporaryFile() as log:
        # A process whose parent ignores SIGINT, as in the background of a script, would ignore it, too.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            process = subprocess.Popen(command, stderr=log, env={**os.environ, **environment})
        finally:
            signal.signal(signal.SIGINT, handler)
        found = ServingProcess(process, Path(log.name))
        with process:
            try:
                if wait:
                    address = re.search(r"(http://\S+?)/health", found.wait_for("loading "))
                    assert address is not None
                    found.url = address[1]
                    found.wait_for("serving ")
                yield found
            finally:
                process.kill()


@contextmanager
def serving_thread(app: Any) -> Iterator[str]:
    """Serve an application in this process, for tests in which clients go away; yields its address."""
    listener = bind("127.0.0.1", 0)
    config = uvicorn.Config(
        app, log_config=None, log_level="error", http=WatchfulProtocol, ws="none", lifespan="off", loop="asyncio"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
