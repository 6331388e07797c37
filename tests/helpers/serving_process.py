"""`picompile-serve` in a process of its own, and applications on a thread."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from helpers.support import BuildOnce, compile_for_test, save_tiny_llama
from picompile_runtime.serving.http.protocol import WatchfulProtocol
from picompile_runtime.serving.http.server import bind

_PATIENCE_S = 60.0


def build_serving_artifact(build_once: BuildOnce) -> Path:
    """Compile a model of random weights, with a token for each byte, for four sequences of 1024 tokens."""

    def make(folder: Path) -> None:
        model = folder.with_name("serving-model")
        save_tiny_llama(model, max_position_embeddings=1024)
        compile_for_test(model, folder, quant="f16", context=1024, sequences=4)

    return build_once("serving-artifact", make)


@dataclass
class ServingProcess:
    """The process and where it listens.

    Attributes:
        url: known when it has begun to load its models.
        lines: what it has written to stderr.
    """

    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)

    def wait_for(self, beginning: str) -> str:
        """Wait for a line with this beginning, and return it."""
        for line in self.process.stderr or ():
            self.lines.append(line.rstrip("\n"))
            if line.startswith(beginning):
                return line
        raise AssertionError(f"the server ended before it wrote {beginning!r}: {self.lines}")

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, and return the exit code."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        code = self.process.wait(_PATIENCE_S)
        self.lines += [line.rstrip("\n") for line in self.process.stderr or ()]
        return code


@contextmanager
def serving(*arguments: object, wait: bool = True, **environment: str) -> Iterator[ServingProcess]:
    """Start the command at a free port with one thread. Unless `wait` is False, wait until it serves."""
    command = [sys.executable, "-m", "picompile_runtime.serving", "--port", "0", "-t", "1", *map(str, arguments)]
    # A process whose parent ignores SIGINT, as in the background of a script, would ignore it, too.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, errors="replace", env={**os.environ, **environment}
        )
    finally:
        signal.signal(signal.SIGINT, handler)
    found = ServingProcess(process)
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
