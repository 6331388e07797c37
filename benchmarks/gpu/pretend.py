"""Stands in for the work of units, to try the clock without a GPU: sleeps, and is right, wrong or hangs."""

import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

Result = dict[str, Any]

# The work of parts that `options.pretend` does not name.
_RIGHT = {"how": "right", "seconds": 0.0}


def work(kind: str, options: Namespace, unit: Any) -> Iterator[Result]:
    """Yield one row, after the seconds that `options.pretend` has for the unit's part of the schedule."""
    asked = {**_RIGHT, **options.pretend.get(unit.facts.get("part", ""), {})}
    time.sleep(asked["seconds"] * options.scale)
    if asked["how"] == "crashes":
        raise RuntimeError(f"{kind} crashes, as was asked for")
    while asked["how"] == "hangs":
        time.sleep(1.0)
    if kind == "machine":
        yield {"machine": {"gpu": "none: all work is sleep", "driver": "0.0", "torch": "none"}}
    elif unit.table == "facts":
        yield {"is_right": False, "reason": "wrong, as was asked for"} if asked["how"] == "wrong" else {}
    else:
        yield {"is_right": asked["how"] != "wrong", "error": 0.0}


def does_not_fit(error: Exception) -> bool:
    """Whether an error says that this machine is too small; none of these does."""
    del error
    return False
