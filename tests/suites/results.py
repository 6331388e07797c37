"""Results of a suite, test by test, as a Markdown table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from reasons import reason


class Results:
    """A plugin of pytest that notes the outcome of each test."""

    def __init__(self) -> None:
        self.outcomes: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note what pytest tells of a test: its set-up, its call and its end, of which the worst counts."""
        file, _, test = report.nodeid.partition("::")
        name = f"{Path(file).stem}::{test}"
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = str(report.longrepr if crash is None else crash.message)
            self.outcomes[name] = "failed", first_line(text).replace("|", "\\|")
        elif report.skipped:
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.outcomes.setdefault(name, ("skipped", first_line(text.removeprefix("Skipped: "))))
        elif report.when == "call":
            self.outcomes.setdefault(name, ("passed", ""))

    def write(self, path: Path | None) -> bool:
        """Print the counts, write the table, and return whether all tests that failed are expected to."""
        print(dict(Counter(outcome for outcome, _ in self.outcomes.values())))
        unknown = [name for name, (outcome, _) in self.outcomes.items() if outcome == "failed" and reason(name) is None]
        for name in unknown:
            print(f"not expected to fail: {name}: {self.outcomes[name][1]}")
        if path is not None:
            path.write_text(table(self._rows()), encoding="utf-8")
        return not unknown

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        for name, (outcome, told) in self.outcomes.items():
            yield name, outcome, (reason(name) or told) if outcome == "failed" else told


def table(rows: Iterable[tuple[str, str, str]]) -> str:
    """Return rows of test, outcome and reason as a Markdown table."""
    lines = ["| test | result | why |", "| --- | --- | --- |"]
    for name, outcome, why in rows:
        told = "`" + name.replace("|", "\\|") + "`"
        lines.append(f"| {told} | {outcome} | {why} |")
    return "\n".join(lines) + "\n"


def first_line(text: str) -> str:
    """Return the first line of a text, shortened."""
    return (text.splitlines() or [""])[0][:160]
