"""This end of the workers: starting them, asking them, and one measurement in turn for each of a group."""

import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.files import Files, LeftOutError
from benchmarks.peers.plan import Contender, Group, Model, Task

# A reply that takes longer will not come. Filling a context of 4096 tokens takes a minute or two.
_LIMIT_S = 900
# Threads of the contender before go to sleep.
_PAUSE_S = 0.2


class Worker:
    """A contender's process."""

    def __init__(self, command: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, bufsize=1
        )
        self.about: dict[str, Any] = self._reply()["about"]

    def measure(self, task: Task) -> dict[str, Any]:
        """The worker's reply. Raises LeftOutError where it has none."""
        try:
            self._process.stdin.write(json.dumps(asdict(task)) + "\n")
        except BrokenPipeError:
            raise LeftOutError(self._last_words()) from None
        reply = self._reply()
        if "error" in reply:
            raise LeftOutError(reply["error"])
        return reply

    def close(self) -> None:
        """Ends the process: its standard input ends."""
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _reply(self) -> dict[str, Any]:
        timer = threading.Timer(_LIMIT_S, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if not line:
            raise LeftOutError(self._last_words())
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _last_words(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1] if lines else f"ended with {code}"


class Workers:
    """The workers of a group, each started once; those that the next group does not need are ended."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._running: dict[tuple[Contender, Model], Worker] = {}
        self._left_out: dict[tuple[Contender, Model], str] = {}

    def of(self, group: Group) -> tuple[dict[Contender, Worker], dict[Contender, str]]:
        """The running ones of a group, and why others are not among them."""
        wanted = {(contender, group.model_of(contender)): contender for contender in group.contenders}
        for key in [key for key in self._running if key not in wanted]:
            self._running.pop(key).close()
        for key in wanted:
            self._start(*key)
        return (
            {contender: self._running[key] for key, contender in wanted.items() if key in self._running},
            {contender: self._left_out[key] for key, contender in wanted.items() if key in self._left_out},
        )

    def close(self) -> None:
        for worker in self._running.values():
            worker.close()
        self._running.clear()

    def _start(self, contender: Contender, model: Model) -> None:
        if (contender, model) in self._running or (contender, model) in self._left_out:
            return
        try:
            self._running[contender, model] = Worker(self._files.command(contender, model))
        except LeftOutError as error:
            self._left_out[contender, model] = str(error)


def measure_group(group: Group, rounds: int, workers: Workers) -> dict[str, Any]:
    """Rounds in which each contender is measured once, and the memory's bandwidth behind each of ours."""
    running, left_out = workers.of(group)
    bandwidth: list[float] = []
    results: dict[str, dict[str, Any]] = {}
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    for number in range(rounds):
        for contender in _rotated(list(running), number):
            time.sleep(_PAUSE_S)
            try:
                reply = running[contender].measure(group.task)
            except LeftOutError as error:
                left_out[contender] = str(error)
                del running[contender]
                continue
            result = results.setdefault(contender.label, {"tokens_per_s": [], "engine": contender.engine})
            result["tokens_per_s"].append(group.task.counted / reply["seconds"])
            result |= {"facts": reply["facts"], "about": running[contender].about}
            if measured := reply["facts"].pop("bandwidth_bytes_per_s", None):
                bandwidth.append(measured)
    return {
        "sweep": group.sweep, "format": group.format, "x": group.x, "model": group.model.name,
        "task": asdict(group.task), "started": started, "load": Path("/proc/loadavg").read_text().split()[0],
        "bandwidth_bytes_per_s": bandwidth, "results": results,
        "left_out": {contender.label: why for contender, why in left_out.items()},
    }  # fmt: skip


def _rotated(contenders: list[Contender], places: int) -> list[Contender]:
    """Over the rounds each has another before it."""
    first = places % max(1, len(contenders))
    return contenders[first:] + contenders[:first]
