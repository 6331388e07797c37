"""A comparison says whether its bound is met and which part loses most, and is JSON whatever was measured."""

import json
import math

import pytest

from picompile.accuracy.comparison import CheckpointComparison, VariantAccuracy
from picompile.intervals import Estimate


def _comparison(
    *added: float, bound: float | None = 0.01, remedies: tuple[str, ...] = (), intervals: bool = True
) -> CheckpointComparison:
    lines, change = [], 0.0
    for number, more in enumerate(added):
        change += more
        around = Estimate(change, *((change - 0.001, change + 0.002) if intervals else (None, None)))
        remedy = remedies[number] if number < len(remedies) else ""
        kl = Estimate(0.1, 0.09, 0.11)
        lines.append(VariantAccuracy(f"part-{number}", f"part {number}", remedy, 9.0, around, kl, 0.9, more, 0.0))
    return CheckpointComparison(bound, 8.0, 123, "some text", tuple(lines))


def test_the_bound_is_on_the_whole() -> None:
    assert _comparison(0.02, -0.015).met
    assert _comparison(0.005, 0.0049).met
    assert not _comparison(0.005, 0.0051).met
    assert not _comparison(math.nan).met
    assert _comparison(0.5, bound=None).met


def test_the_refusal_names_the_part_that_adds_most() -> None:
    refused = _comparison(0.005, 0.0123, -0.001, remedies=("one thing", "--quant q8"))
    assert refused.worst.part == "part-1"
    assert refused.refusal == (
        "the perplexity is +1.63 % against the checkpoint's (95 %: +1.53 to +1.83 %), more than 1 %; most is lost by "
        "part 1 (part 0 +0.50 %, part 1 +1.23 %, part 2 -0.10 %); choose --quant q8, or allow more with "
        "--checkpoint-bound"
    )
    assert _comparison(0.02).refusal.endswith("(part 0 +2.00 %); allow more with --checkpoint-bound")
    assert "(123 tokens, too few for an interval: read more" in _comparison(0.02, intervals=False).refusal


@pytest.mark.parametrize("change", [0.02, math.inf, math.nan])
def test_everything_is_json(change: float) -> None:
    found = json.loads(json.dumps(_comparison(change).to_json(), allow_nan=False))
    assert found["relative_change"] == (change if change == 0.02 else None)
    assert found["lines"][0]["title"] == "part 0"
    assert found["lines"][0]["kl_nats_interval"] == [0.09, 0.11]
    assert (found["bound"], found["tokens"], found["text"]) == (0.01, 123, "some text")
