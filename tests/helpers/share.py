"""The share of slow tests that CI draws: other ones for each commit, the same ones each time that it is asked for.

pytest -m slow --share 0.25 --share-seed COMMIT
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence

import pytest


def add_options(parser: pytest.Parser) -> None:
    """Add `--share` and `--share-seed` to pytest's options."""
    parser.addoption("--share", type=float, help="the share of slow tests that is drawn; all without")
    parser.addoption("--share-seed", default="", metavar="TEXT", help="what the draw depends on, such as a commit")


def draw_share(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the slow tests that were not drawn out of `items`. Their marks must be settled."""
    share = config.getoption("share")
    if share is None:
        return
    slow = [item.nodeid for item in items if item.get_closest_marker("slow")]
    left = set(slow) - set(drawn(slow, share, config.getoption("share_seed")))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
    items[:] = [item for item in items if item.nodeid not in left]


def drawn(names: Sequence[str], share: float, seed: str) -> list[str]:
    """Return the names that are drawn: of each test with several parameters some, of those with one each a share."""
    tests: dict[str, list[str]] = defaultdict(list)
    for name in names:
        tests[name.partition("[")[0]].append(name)
    found = []
    for test, cases in tests.items():
        cases.sort(key=lambda name: _number(name, seed))
        number = math.ceil(share * len(cases)) if len(cases) > 1 else int(_number(test, seed) < share)
        found += cases[:number]
    return found


def _number(name: str, seed: str) -> float:
    """Return a number in [0, 1) that depends on the name and the seed alone."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
