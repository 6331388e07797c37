"""The mark `slow` of tests that `make test` leaves to `make test-slow`.

`@pytest.mark.slow("why", but=("q4-", "f16-1]"))` leaves some parameters of a test fast: those whose id begins with an
entry of `but`. The closing bracket counts as the end of an id, so that an entry can name one id alone.
"""

from collections.abc import Sequence

import pytest


def settle_slow_marks(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Take the mark `slow` from the tests that its `but` leaves fast.

    Raises:
        pytest.UsageError: If a mark has no reason, or `but` has an entry that fits no parameter of its test.
    """
    left: dict[str, set[str]] = {}
    for item in items:
        for node, mark in item.iter_markers_with_node("slow"):
            _check(mark, node.nodeid, may_have_but=node is item)
        name, _, parameters = item.name.partition("[")
        for mark in [mark for mark in item.own_markers if mark.name == "slow"]:
            fitting = {start for start in mark.kwargs.get("but", ()) if parameters.startswith(start)}
            test = f"{item.parent.nodeid if item.parent else ''}::{name}"
            left.setdefault(test, set(mark.kwargs.get("but", ()))).difference_update(fitting)
            if fitting:
                item.own_markers.remove(mark)
    # With `--lf`, and where an id was asked for, not all parameters of a test are collected.
    if config.getoption("lf", False) or any("[" in argument for argument in config.args):
        return
    for test, unused in left.items():
        if unused:
            raise pytest.UsageError(f"{test}: `but` of its mark `slow` fits no parameter: {', '.join(sorted(unused))}")


def _check(mark: pytest.Mark, place: str, *, may_have_but: bool) -> None:
    but = mark.kwargs.get("but", ())
    if not (len(mark.args) == 1 and isinstance(mark.args[0], str) and mark.args[0].strip()):
        raise pytest.UsageError(f'{place}: the mark needs one reason: @pytest.mark.slow("why")')
    if mark.kwargs.keys() - {"but"} or not isinstance(but, tuple):
        raise pytest.UsageError(f'{place}: the mark takes nothing beside a reason and but=("...",), a tuple')
    if but and not may_have_but:
        raise pytest.UsageError(f"{place}: only a mark at a function can have `but`")
