import math

import pytest

from picompile.errors import UsageError
from picompile.quantities import parse_accuracy_bound, parse_checked_bound, parse_share


@pytest.mark.parametrize(
    ("text", "share"), [("0.1%", 0.001), ("0.001", 0.001), (" 6 %", 0.06), ("100%", 1), ("0", 0), ("1e-3", 0.001)]
)
def test_shares_are_parsed(text: str, share: float) -> None:
    assert parse_share(text, "--budget") == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "%", "many", "-1%", "101%", "nan", "inf", "0.1%%"])
def test_invalid_shares_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--budget"):
        parse_share(text, "--budget")


def test_the_accuracy_check_can_be_off() -> None:
    assert parse_accuracy_bound("off") is None
    assert parse_accuracy_bound("Off ") is None
    assert parse_accuracy_bound("0.5%") == pytest.approx(0.005)
    assert parse_checked_bound("off") is None
    assert parse_checked_bound("Report") == math.inf
    assert parse_checked_bound("0.5%") == pytest.approx(0.005)
    with pytest.raises(UsageError, match="--gate"):
        parse_checked_bound("reports")
