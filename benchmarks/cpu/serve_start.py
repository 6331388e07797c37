"""The time until a server answers: at its first start, at later ones, and after it was killed.

    python -m benchmarks.cpu.serve_start ARTIFACT [--rounds 5] [--streams 8] [--threads N] [--out FILE.json]

Measures, from the start of the process until GET /health answers 200, in seconds (median and worst of the rounds):

- first: the artifact is in the page cache, but was never loaded by this user, so that its weights are hashed;
- warm: it was loaded before;
- cold: it was loaded before, and its files are not in the page cache, from which they are dropped. Where they still are
  (tmpfs, or another process has them mapped), `share_of_weights_still_cached` says so;
- restart: from the moment that a server which streams answers is killed (SIGKILL), to another one at its port.

Then SIGTERM, while it streams: every answer must come to its end, and the process must end with 0.

Exits with 1 if an answer was cut off, or the exit code is another.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.script import argument_parser

_PATIENCE_S = 300.0
_POLL_S = 0.002
_TOKENS = 64


def main() -> int:
    parser = argument_parser(__doc__, "artifact", "--threads", rounds=5, streams=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = measure(options)
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    drained = result["drained"]
    return int(drained["exit_code"] != 0 or drained["complete"] != options.streams)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds and return the figures."""
    folder, rounds = options.artifact, range(options.rounds)
    command = [sys.executable, "-m", "picompile_server", f"--model=model={folder}"]
    command += [] if options.threads is None else ["--threads", str(options.threads)]
    with tempfile.TemporaryDirectory() as cache:
        first = []
        for number in rounds:
            read(folder)
            first.append(start_s(command, f"{cache}/{number}"))
        start_s(command, cache)
        warm = [start_s(command, cache) for _ in rounds]
        cold, shares = [], []
        for _ in rounds:
            shares.append(drop_from_page_cache(folder))
            cold.append(start_s(command, cache))
        restarts = [restart_s(command, cache, options.streams) for _ in rounds]
        drained = drain(command, cache, options.streams)
    return {
        "artifact_bytes": sum(file.stat().st_size for file in files(folder)),
        "first_s": summary(first),
        "warm_s": summary(warm),
        "cold_s": {
            **summary(cold),
            "share_of_weights_still_cached": max((share for share in shares if share is not None), default=None),
        },
        "restart_s": summary(restarts),
        "drained": drained,
    }


def summary(seconds: list[float]) -> dict[str, float]:
    """Return the median and the worst."""
    return {"median": round(statistics.median(seconds), 3), "worst": round(max(seconds), 3)}


def files(folder: Path) -> list[Path]:
    """Return the files of an artifact."""
    return [path for path in folder.rglob("*") if path.is_file()]


def read(folder: Path) -> None:
    """Have the files in the page cache."""
    for path in files(folder):
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass


def drop_from_page_cache(folder: Path) -> float | None:
    """Drop the files of an artifact from the page cache. Return the share of the largest that is still there."""
    for path in files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return share_in_page_cache(max(files(folder), key=lambda path: path.stat().st_size))


def share_in_page_cache(path: Path) -> float | None:
    """Return which share of a file is in the page cache; None without util-linux's `fincore`."""
    program = shutil.which("fincore")
    if program is None:
        return None
    told = subprocess.run(
        [program, "--bytes", "--noheadings", "--output", "RES", path], capture_output=True, check=True
    )
    return int(told.stdout) / path.stat().st_size


@contextmanager
def running(command: list[str], cache: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server; kill it when the block ends. Stamps of files that were found whole are in `cache`."""
    environment = {**os.environ, "XDG_CACHE_HOME": cache}
    process = subprocess.Popen([*command, "--port", str(port)], env=environment, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def await_ready(process: subprocess.Popen[bytes], port: int) -> None:
    """Return when GET /health answers 200."""
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}")
        try:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")
                if b" 200 " in connection.recv(64):
                    return
        except OSError:
            pass
        time.sleep(_POLL_S)
    raise RuntimeError(f"the server was not ready in {_PATIENCE_S:.0f} s")


def start_s(command: list[str], cache: str) -> float:
    """Return how long a server takes from its start until it is ready."""
    port, start = free_port(), time.monotonic()
    with running(command, cache, port) as process:
        await_ready(process, port)
        return time.monotonic() - start


def restart_s(command: list[str], cache: str, streams: int) -> float:
    """Return how long it takes from the moment that a streaming server is killed until the next one is ready."""
    port = free_port()
    with running(command, cache, port) as process:
        await_ready(process, port)
        with streaming(port, streams):
            process.kill()
            start = time.monotonic()
            process.wait()
            with running(command, cache, port) as successor:
                await_ready(successor, port)
                return time.monotonic() - start


def drain(command: list[str], cache: str, streams: int) -> dict[str, Any]:
    """Send SIGTERM to a server that streams; return how many answers were complete, and the exit code."""
    port = free_port()
    with running(command, cache, port) as process:
        await_ready(process, port)
        with streaming(port, streams) as finishes:
            start = time.monotonic()
            process.send_signal(signal.SIGTERM)
            code = process.wait(_PATIENCE_S)
            ended_s = time.monotonic() - start
        complete = finishes.count("length")
    return {"streams": streams, "complete": complete, "exit_code": code, "s": round(ended_s, 3)}


@contextmanager
def streaming(port: int, streams: int) -> Iterator[list[str]]:
    """Ask for answers, and run the block when each of them has begun.

    Yields why each ended, which is known after the block: "" where the connection was lost.
    """
    begun, finishes = threading.Barrier(streams + 1), list[str]()

    def ask(number: int) -> None:
        body = {"prompt": f"{number} ", "max_tokens": _TOKENS, "ignore_eos": True, "stream": True}
        finish, is_first = "", True
        try:
            with httpx.stream(
                "POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=_PATIENCE_S
            ) as answer:
                for line in answer.iter_lines():
                    if is_first:
                        begun.wait(_PATIENCE_S)
                        is_first = False
                    if line.startswith("data: {"):
                        choices = json.loads(line.removeprefix("data: "))["choices"]
                        finish = choices[0]["finish_reason"] or finish
        except httpx.TransportError:
            finish = ""
        finishes.append(finish)

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(streams)]
    for client in clients:
        client.start()
    begun.wait(_PATIENCE_S)
    yield finishes
    for client in clients:
        client.join()


def free_port() -> int:
    """Return a port at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


if __name__ == "__main__":
    sys.exit(main())
