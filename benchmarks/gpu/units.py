"""The units of work of `benchmarks.gpu`, and the child processes that do them.

What fails on a GPU takes its process with it: after a wrong access no later call of the driver succeeds, PyTorch's
calls included, and a kernel that waits for ever is ended by nothing else. So the process that has the results never
touches the GPU. Another one does units in their order and sends rows of results; where it fails, dies or takes too
long, the unit's row says so and where the process was, and a new process goes on with the next unit. That one has
been started before it is needed, since PyTorch takes seconds to import.
"""

import math
import os
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.gpu.faults import MOST_CHARACTERS, Watch, ask, ending, has_begun, stacks

Result = dict[str, Any]

# Besides a unit's own limit, until a process has said that it is ready: importing takes seconds.
_START_S, _END_S = 90.0, 10.0

# The first row that a process sends.
_READY: Result = {"ready": True}

LATE = "was not done when its time was over"
NOT_DONE = "was not come to"


@dataclass(frozen=True)
class Unit:
    """`kind` says what is done with `content`; its rows go to `table` with `facts`, and take `limit_s` each at most.

    It is begun and goes on until `ends_s` of the monotonic clock. Where a unit that `is_gate` fails, no other is begun.
    """

    kind: str
    table: str
    content: Mapping[str, Any]
    facts: Mapping[str, Any]
    limit_s: float = 60.0
    is_gate: bool = False
    ends_s: float = math.inf

    def row(self, is_right: bool | None, reason: str, text: str = "") -> Result:
        """Return a row without a result."""
        found = {**self.facts, "is_right": is_right, "reason": reason}
        return found | {"traceback": text} if text else found


class Workers:
    """The processes that do units: the one at work, and one that has imported all and waits for its turn."""

    def __init__(self, options: Namespace, has_spare: bool = True) -> None:
        """`options` are those of `benchmarks.gpu`, with a folder `work` that may be made and removed."""
        self._options, self._made = options, 0
        self._spare = self._start() if has_spare else None
        self._current: _Child | None = None

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for child in filter(None, (self._current, self._spare)):
            child.end()

    def take(self) -> "_Child":
        """Return the process at work, or the one that waits in its place if that has ended."""
        if self._current is None or self._current.has_ended:
            self._current, self._spare = self._spare or self._start(), self._spare and self._start()
        return self._current

    def _start(self) -> "_Child":
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        work, self._made = Path(self._options.work), self._made + 1
        # Beside the folder for weights, which comes and goes.
        faults = work.with_name(f"{work.name}.faults{self._made}")
        process = context.Process(target=_serve, args=(theirs, self._options, faults), daemon=True)
        process.start()
        theirs.close()
        return _Child(ours, process, faults)


def rows(unit: Unit, workers: Workers) -> Iterator[Result]:
    """Yield the rows of one unit. If it fails or is late, the last one says so, and its process has ended."""
    if time.monotonic() >= unit.ends_s:
        yield unit.row(None, NOT_DONE)
        return
    child, is_right = workers.take(), False
    child.send(unit)
    while not child.has_ended:
        left_s = unit.ends_s - time.monotonic()
        wait_s = unit.limit_s + (0.0 if child.is_ready else _START_S)
        if child.ours.poll(max(0.0, min(wait_s, left_s))):
            row = child.receive()
            if row is None:
                return
            if row == _READY:
                child.is_ready = True
                continue
            is_right = is_right or row.get("is_right") is True
            yield {**unit.facts, **row}
        elif left_s < wait_s:
            ask(child.process)
            reason = LATE if has_begun(child.faults) else NOT_DONE
            yield unit.row(None, reason, child.end())
        else:
            # A unit that has given a right row, with fewer threads say, is only slow.
            yield unit.row(None if is_right else False, f"nothing came within {wait_s:.0f} s", child.end())


class _Child:
    """A process, our end of its pipe, and the file for its stacks."""

    def __init__(self, ours: Connection, process: BaseProcess, faults: Path) -> None:
        self.ours, self.process, self.faults = ours, process, faults
        self.has_ended = self.is_ready = False

    def send(self, unit: Unit) -> None:
        """Give it a unit to do; if the process is no more, that shows where its rows are received."""
        with suppress(OSError):
            self.ours.send(unit)

    def receive(self) -> Result | None:
        """Return the row that has come, None at the end of a unit. The last row of a process that failed says why."""
        try:
            row, goes_on = self.ours.recv()
        except (EOFError, OSError):
            self.process.join(_END_S)
            reason = ending(self.process.exitcode)
            return {"is_right": False, "reason": reason, "traceback": self.end()}
        if not goes_on:
            self.end()
        found: Result | None = row
        return found

    def end(self) -> str:
        """End the process, and return the stacks that it has left."""
        self.has_ended = True
        self.process.kill()
        self.process.join(_END_S)
        return stacks(self.faults)


def _serve(theirs: Connection, options: Namespace, faults: Path) -> None:
    """Do units as they come, up to the first that fails."""
    # PyTorch, beside which all modules of a process are loaded eagerly or none, would load every kernel that it has.
    # Ours are loaded when graphs are bound, before any of them runs.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    does_not_fit: Callable[[Exception], bool] = _is_never
    try:
        watch = Watch(faults)
        work, does_not_fit = _worker(options)
        theirs.send((_READY, True))
        while True:
            unit = theirs.recv()
            watch.begin(unit.limit_s)
            for row in work(unit.kind, options, unit):
                theirs.send((row, True))
                watch.begin(unit.limit_s)
            watch.end()
            theirs.send((None, True))
    except EOFError:
        return
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        text = traceback.format_exc()[-MOST_CHARACTERS:]
        is_right = None if does_not_fit(error) else False
        theirs.send(({"is_right": is_right, "reason": reason, "traceback": text}, False))


def _is_never(error: Exception) -> bool:
    """Say of any error that it is not for lack of memory: none that is raised while modules are imported."""
    del error
    return False


def _worker(options: Namespace) -> tuple[Callable[..., Iterator[Result]], Callable[[Exception], bool]]:
    """Return what does a unit, and what says whether an error is for lack of memory.

    Only here: PyTorch takes seconds to import, and the parent has no use for it.
    """
    module = import_module("benchmarks.gpu.pretend" if options.pretend else "benchmarks.gpu.work")
    return module.work, module.does_not_fit
