"""A run of `benchmarks.gpu`: its results, what it says of them as they come, and the files that keep both."""

import json
import os
import signal
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from benchmarks.gpu.report import empty_results, line, text_of
from benchmarks.gpu.sanitizer import sanitize
from benchmarks.gpu.schedule import Clock, Part
from benchmarks.gpu.sources import SCHEMA
from benchmarks.gpu.units import NOT_DONE, Unit, Workers, rows

Result = dict[str, Any]

_STOPPED = "an earlier step failed without which nothing works"


class Run:
    """The results so far. However it ends, its tables are printed, and all units that were left are in them."""

    def __init__(self, options: Namespace, files: Path | None, clock: Clock) -> None:
        """Begin to write `files` with .json and .txt behind it; nothing, and no tables at the end, if it is None."""
        self._options, self._files, self._clock = options, files, clock
        self.results = empty_results(SCHEMA, bool(options.device_library or options.pretend))
        self._left: list[Unit] = []
        self._log: TextIO | None = None
        if files is not None:
            files.parent.mkdir(parents=True, exist_ok=True)
            self._log = files.with_name(f"{files.name}.txt").open("w", encoding="utf-8")

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        if self._files is None:
            return
        # Whoever ends the run is told what it has found; a second time would end that.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for unit in self._left:
            self._add(unit, unit.row(None, NOT_DONE))
        self._save()
        self._print(text_of(self.results))
        self._print(self._verdict())
        if self._log is not None:
            self._log.close()

    @property
    def is_wrong(self) -> bool:
        """Whether anything was found to be wrong."""
        return any(
            row["is_right"] is False for name in ("kernels", "checks", "models", "failed") for row in self.results[name]
        )

    @property
    def unsure(self) -> list[str]:
        """Return the labels of what must be right before speeds mean anything, and is neither right nor wrong."""
        decisive = [row for row in self.results["failed"] if row["is_gate"]] + self.results["checks"]
        decisive += [row for row in self.results["kernels"] if row["folder"] == "small"]
        return [row["label"] for row in decisive if row["is_right"] is None]

    @property
    def exit_code(self) -> int:
        """Return 1 if anything is wrong, 2 if something that must be right was not measured, else 0."""
        return 1 if self.is_wrong else 2 if self.unsure else 0

    def do_parts(self, parts: Sequence[Part], workers: Workers) -> None:
        """Do a schedule; nothing behind a gate that failed."""
        self._left = [unit for part in parts for unit in part.units]
        for part in parts:
            ends_s = self._clock.at(part.ends_s)
            wrong = [row for row in self.results["kernels"] if row["is_right"] is False]
            if part.yields and wrong:
                self.say(f"{part.name}: left out, for the sanitizer")
                sanitize(self.results["kernels"], self._options, ends_s)
                self._save()
            elif not self.do(part.units, workers, ends_s):
                self.say(f"ended: {_STOPPED}")
                return

    def do(self, units: Sequence[Unit], workers: Workers, ends_s: float = float("inf")) -> bool:
        """Do units until a time of the monotonic clock; false if a gate failed."""
        for unit in units:
            has_failed = False
            for row in rows(replace(unit, ends_s=ends_s, limit_s=unit.limit_s * self._clock.scale), workers):
                self._add(unit, row)
                self._save()
                has_failed = has_failed or "reason" in row
            if unit in self._left:
                self._left.remove(unit)
            if unit.is_gate and has_failed:
                return False
        return True

    def _add(self, unit: Unit, row: Result) -> None:
        if "traceback" in row and row["is_right"] is False:
            self.say(row["traceback"])
        if unit.table == "facts" and "reason" not in row:
            found = {key: value for key, value in row.items() if key not in unit.facts}
            self.results.update(found)
            self.say(f"{unit.kind}: {found}")
            return
        row = {"label": unit.kind, "is_gate": unit.is_gate, **row} if unit.table == "facts" else row
        table = self.results["failed" if unit.table == "facts" else unit.table]
        if table and table[-1].pop("partial", False):
            # The next row is of the same unit. If it has no result, the measured one stays, and waits for no more.
            partial = table.pop()
            row = partial | {"unfinished": row["reason"]} if "reason" in row else row
        table.append(row)
        self.say(line(row, self.results))

    def say(self, text: str) -> None:
        """Print a line behind the time of the schedule, and keep it."""
        self._print(f"[{self._clock.now():6.1f} s] {text}")

    def _print(self, text: str) -> None:
        print(text, flush=True)
        if self._log is not None:
            print(text, file=self._log, flush=True)

    def _verdict(self) -> str:
        if self.results["machine"] is None and self.is_wrong:
            return "NOTHING WAS MEASURED: there is no GPU that can be used"
        if self.is_wrong:
            return "NOT GREEN: something is wrong; give the machine back, and mend it"
        if self.unsure:
            return f"NOT GREEN: {len(self.unsure)} that must be right were not measured: {', '.join(self.unsure[:5])}"
        return f"GREEN: nothing is wrong, after {self._clock.now():.0f} s"

    def _save(self) -> None:
        """Write the results whole each time, so that a run that is killed has left what it knew."""
        if self._files is not None:
            path = self._files.with_name(f"{self._files.name}.json")
            new = path.with_name(f"{path.name}.new")
            new.write_text(json.dumps(self.results, indent=1) + "\n")
            os.replace(new, path)
