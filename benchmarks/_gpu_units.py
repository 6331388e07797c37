"""The units of work of `gpu.py`, and the child processes that do them.

What fails on a GPU takes its process with it: after a wrong access no later call of the driver succeeds, PyTorch's
calls included, and a kernel that waits for ever is ended by nothing else. So the process that has the results never
touches the GPU. Another one does units in their order and sends rows of results; where it fails, dies or takes too
long, the unit's row says so and where the process was, and a new process goes on with the next unit.
"""

import time
import traceback
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from _gpu_faults import MOST_CHARACTERS, Watch, ask, ending, has_begun, stacks

Result = dict[str, Any]

# Besides a row's own limit: importing, and the first calls of driver and PyTorch.
_START_S, _END_S = 90.0, 10.0

BLOCKED = "the ping-pong failed: host and GPU do not see what the other writes"
LATE = "was not done when the time was over"


@dataclass(frozen=True)
class Unit:
    """`kind` says what is done with `content`; its rows go to `table` with `facts`, and take `limit_s` each at most.

    Where the unit that `is_gate` fails, those that `needs_exchange` are not done: host and GPU wait for each other.
    """

    kind: str
    table: str
    content: Mapping[str, Any]
    facts: Mapping[str, Any]
    limit_s: float = 60.0
    is_gate: bool = False
    needs_exchange: bool = False

    def row(self, is_right: bool | None, reason: str, text: str = "") -> Result:
        """Return a row without a result."""
        found = {**self.facts, "is_right": is_right, "reason": reason}
        return found | {"traceback": text} if text else found


def faults_file(options: Namespace) -> Path:
    """Return where a child writes where it hangs or crashes: beside the folder for weights, which comes and goes."""
    work = Path(options.work)
    return work.with_name(f"{work.name}.faults")


def run(units: Sequence[Unit], options: Namespace, deadline_s: float) -> Iterator[tuple[Unit, Result | None]]:
    """Rows of `units`, as they come, and None behind those of each; until `deadline_s` of the monotonic clock.

    `options` are those of `gpu.py`, with a folder `work` that may be made and removed.
    """
    pending, context = deque(units), get_context("spawn")
    while pending and time.monotonic() < deadline_s:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(theirs, options, list(pending)), daemon=True)
        process.start()
        theirs.close()
        child = _Child(ours, process, faults_file(options))
        try:
            for unit, row in _received(child, pending, deadline_s):
                yield unit, row
                if unit.is_gate and row is not None and row.get("is_right") is False:
                    yield from _blocked(pending)
        finally:
            child.end()


def _blocked(pending: deque[Unit]) -> Iterator[tuple[Unit, Result | None]]:
    for unit in [unit for unit in pending if unit.needs_exchange]:
        pending.remove(unit)
        yield unit, unit.row(None, BLOCKED)
        yield unit, None


@dataclass(frozen=True)
class _Child:
    """A process, our end of its pipe, and the file for its stacks."""

    ours: Connection
    process: BaseProcess
    faults: Path

    def end(self) -> str:
        """End the process, and return the stacks that it has left."""
        self.process.kill()
        self.process.join(_END_S)
        return stacks(self.faults)


def _received(child: _Child, pending: deque[Unit], deadline_s: float) -> Iterator[tuple[Unit, Result | None]]:
    """The rows of one process. What it has done leaves `pending`, and so does the unit in which it ended."""
    extra_s, is_alive, right = _START_S, True, None
    while pending and is_alive:
        unit, left_s = pending[0], deadline_s - time.monotonic()
        wait_s, extra_s = unit.limit_s + extra_s, 0.0
        if child.ours.poll(max(0.0, min(wait_s, left_s))):
            row = _row(child)
        elif left_s < wait_s:
            ask(child.process)
            row, is_alive = unit.row(None, LATE) if has_begun(child.faults) else None, False
            text = child.end()
            row = row and row | {"traceback": text}
        else:
            # A unit that has given a right row, with fewer threads say, is only slow.
            is_right = None if right is unit else False
            row = unit.row(is_right, f"nothing came within {wait_s:.0f} s", child.end())
        if row is not None:
            right = unit if row.get("is_right") else right
            yield unit, {**unit.facts, **row}
            is_alive = is_alive and "reason" not in row
        elif not is_alive:
            return
        if row is None or not is_alive:
            pending.remove(unit)
            yield unit, None


def _row(child: _Child) -> Result | None:
    """Return the row that the process sent, None at the end of a unit. If the process ended, the row says so."""
    try:
        row: Result | None = child.ours.recv()
    except (EOFError, OSError):
        child.process.join(_END_S)
        reason = ending(child.process.exitcode)
        return {"is_right": False, "reason": reason, "traceback": child.end()}
    return row


def _serve(theirs: Connection, options: Namespace, units: Sequence[Unit]) -> None:
    """Does `units`, up to the first that fails."""
    watch = Watch(faults_file(options))
    # Only here: PyTorch takes seconds to import, and the parent has no use for it.
    from _gpu_work import does_not_fit, work

    try:
        for unit in units:
            watch.begin(unit.limit_s)
            for row in work(unit.kind, options, unit.content):
                theirs.send(row)
                watch.begin(unit.limit_s)
            theirs.send(None)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        text = traceback.format_exc()[-MOST_CHARACTERS:]
        theirs.send({"is_right": None if does_not_fit(error) else False, "reason": reason, "traceback": text})
