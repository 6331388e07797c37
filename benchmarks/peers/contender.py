"""Runs contenders: workers that stay loaded, built programs, and one measurement in turn for each of a group."""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.outputs import OutputError, Reading
from benchmarks.peers.engines import ENGINES, PROGRAMS, Engine, Task
from benchmarks.peers.files import Files, LeftOutError, module
from benchmarks.peers.plan import Contender, Group, Model

# A reply that takes longer will not come. Filling a context of 4096 tokens takes a minute or two.
_LIMIT_S = 900
# Threads of the contender before go to sleep.
_PAUSE_S = 0.2


class Worker:
    """A contender's process."""

    def __init__(self, command: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
            env=environment(),
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout
        self.about: dict[str, Any] = self._reply()["about"]

    def measure(self, task: Task) -> dict[str, Any]:
        """The worker's reply. Raises LeftOutError where it has none."""
        try:
            self._requests.write(json.dumps(asdict(task)) + "\n")
        except BrokenPipeError:
            raise LeftOutError(self._last_words()) from None
        reply = self._reply()
        if "error" in reply:
            raise LeftOutError(reply["error"])
        return reply

    def close(self) -> None:
        """Ends the process: its standard input ends."""
        self._requests.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._replies.close()
        self._errors.close()

    def _reply(self) -> dict[str, Any]:
        timer = threading.Timer(_LIMIT_S, self._process.kill)
        timer.start()
        line = self._replies.readline()
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


class Program:
    """A built program, which loads its model anew for each measurement and prints a speed."""

    def __init__(self, engine: Engine, path: Path, model: Path) -> None:
        if engine.arguments is None or engine.read is None:
            raise ValueError(f"{engine.name} is no built program")
        self._arguments, self._read, self._path, self._model = engine.arguments, engine.read, path, model
        self.about: dict[str, Any] = {"version": f"{engine.name}, {path}"}

    def measure(self, task: Task) -> dict[str, Any]:
        """Return the reply that a worker would give. Raises LeftOutError where there is no speed."""
        if task.batch > 1:
            raise LeftOutError("several sequences are not measured of it")
        command = [str(self._path), *map(str, self._arguments(self._model, task))]
        try:
            ran = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S
            )
        except OSError as error:
            raise LeftOutError(f"{self._path}: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise LeftOutError(f"{self._path}: nothing came in {_LIMIT_S} s") from error
        if ran.returncode:
            last = (ran.stderr.strip().splitlines() or [""])[-1]
            raise LeftOutError(f"{self._path} ended with {ran.returncode}: {last}")
        reading = self._reading(ran, task.op == "prefill")
        self.about["system"] = reading.system
        return {"seconds": task.counted / reading.tokens_per_s, "facts": {}}

    def _reading(self, ran: "subprocess.CompletedProcess[str]", is_prompt: bool) -> Reading:
        """Rows are on standard output, times that `main` prints on standard error."""
        try:
            return self._read(ran.stdout, is_prompt)
        except OutputError:
            try:
                return self._read(ran.stderr, is_prompt)
            except OutputError as error:
                raise LeftOutError(f"{self._path}: {error}") from error

    def close(self) -> None:
        """Nothing runs between measurements."""


def prepare(contender: Contender, model: Model, files: Files) -> Path:
    """Return the file that a contender runs, made if it is not there. Raises LeftOutError where it cannot take part."""
    # The program first: who has none need not wait for the file.
    if contender.engine in PROGRAMS and contender.engine not in files.programs:
        raise LeftOutError(f"name a built program: --program {contender.engine}=PATH")
    return files.file(contender, model)


def start(contender: Contender, model: Model, files: Files) -> Worker | Program:
    """Start a contender. Raises LeftOutError where it cannot take part."""
    engine, file = ENGINES[contender.engine], prepare(contender, model, files)
    if engine.arguments:
        return Program(engine, files.programs[engine.name], file)
    python = sys.executable if engine.is_ours else files.peer_python
    return Worker(module(python, f"{engine.worker}_worker", file, contender.format))


class Workers:
    """The contenders of a group, each started once; those that the next group does not need are ended."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._running: dict[tuple[Contender, Model], Worker | Program] = {}
        self._left_out: dict[tuple[Contender, Model], str] = {}

    def of(self, group: Group) -> tuple[dict[Contender, Worker | Program], dict[Contender, str]]:
        """The running ones of a group, and why others are not among them."""
        wanted = {(contender, group.model): contender for contender in group.contenders}
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
            self._running[contender, model] = start(contender, model, self._files)
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
