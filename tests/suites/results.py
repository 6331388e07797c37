"""Results of a suite, test by test, as a Markdown table: each failure that is expected has its reason in results/.

The table is written to SUITE_OUT, if that is set.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

_FAILED = re.compile(r"^\| `(.*)` \| failed \| (.+) \|$", re.MULTILINE)


def _reasons() -> dict[str, str]:
    """Return why tests fail that are expected to, by their names, as the tables that are kept have it."""
    texts = [Path(__file__).with_name("results").joinpath(f"{suite}.md").read_text() for suite in ("vllm", "llama")]
    return {name.replace("\\|", "|"): why for text in texts for name, why in _FAILED.findall(text)}


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

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: Any) -> None:
        """Print the counts, write the table, and have pytest return 0 if all tests that failed are expected to."""
        reasons, rows, is_expected = _reasons(), ["| test | result | why |", "| --- | --- | --- |"], True
        print("", dict(Counter(outcome for outcome, _ in self.outcomes.values())))
        for name, (outcome, told) in self.outcomes.items():
            if outcome == "failed" and name not in reasons:
                print(f"not expected to fail: {name}: {told}")
                is_expected = False
            why = reasons.get(name, told) if outcome == "failed" else told
            rows.append("| `{}` | {} | {} |".format(name.replace("|", "\\|"), outcome, why))
        if path := os.environ.get("SUITE_OUT"):
            Path(path).write_text("\n".join(rows) + "\n", encoding="utf-8")
        session.exitstatus = 0 if is_expected else 1


def first_line(text: str) -> str:
    """Return the first line of a text, shortened."""
    return (text.splitlines() or [""])[0][:160]
