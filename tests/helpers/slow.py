"""Which tests `make test` leaves to `make test-slow`, and why.

Each rule names tests by how their ids begin, and those among them that stay fast. What stays is one path through each
family, each format and each kernel, and every property of every pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class SlowTests:
    """Tests whose ids, seen from tests/, begin with one of `tests`, but for those that begin with one of `fast`."""

    why: str
    tests: tuple[str, ...]
    fast: tuple[str, ...] = ()


SLOW: tuple[SlowTests, ...] = ()


def mark_slow_tests(items: Sequence[pytest.Item], *, all_collected: bool) -> None:
    """Give the marker `slow` to the tests that a rule names.

    Raises:
        pytest.UsageError: Where every test was collected, and the beginning of an id in a rule fits none of them.
    """
    unused = {start for rule in SLOW for start in (*rule.tests, *rule.fast)}
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        unused -= {start for start in unused if name.startswith(start)}
        if any(name.startswith(rule.tests) and not name.startswith(rule.fast or "\n") for rule in SLOW):
            item.add_marker("slow")
    if all_collected and unused:
        raise pytest.UsageError(f"tests/helpers/slow.py names tests that are not there: {sorted(unused)}")
