"""A server in a process of its own, and streams of its answers, for the benchmarks of serving."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

_LISTENING = re.compile(r"http://[\d.]+:(\d+)")
_READY_S, _POLL_S = 120.0, 0.002


async def stream(client: httpx.AsyncClient, request: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the chunks of a streamed completion as they come. Raises RuntimeError where one says that it failed."""
    async with client.stream("POST", "/v1/completions", json=request) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                yield chunk


class ServedArtifact:
    """`picompile serve` on a free port; ready when the block begins, ended by SIGTERM with it.

    `start_s` is how long it took from the start of its process until it was ready.
    """

    def __init__(self, artifact: Path, threads: int | None = None, variables: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "picompile_server", str(artifact), "--port", "0"]
        if threads is not None:
            command += ["--threads", str(threads)]
        start, environment = time.monotonic(), {**os.environ, **(variables or {})}
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.url = self._listening()
        self._await_ready(start)
        self.start_s = time.monotonic() - start

    def _listening(self) -> str:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if found := _LISTENING.search(line):
                return found[0]
        raise RuntimeError(f"the server ended with exit code {self._process.wait()} before it listened")

    def _await_ready(self, start: float) -> None:
        with httpx.Client(base_url=self.url) as client:
            while time.monotonic() < start + _READY_S:
                if client.get("/health").status_code == httpx.codes.OK:
                    return
                time.sleep(_POLL_S)
        raise RuntimeError(f"the server was not ready in {_READY_S:.0f} s")

    def resident_bytes(self) -> int:
        """Return the memory of the server's process."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        (size,) = re.findall(r"VmRSS:\s+(\d+) kB", status)
        return int(size) * 1024

    def __enter__(self) -> "ServedArtifact":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        code = self._process.wait(60)
        if code and error is None:
            raise RuntimeError(f"the server ended with exit code {code} after SIGTERM")
