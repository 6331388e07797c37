"""Two amounts are told so that one can see which is more."""

import pytest

from picompile_runtime.amounts import two_amounts

GIB = 2**30


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (3 * GIB, GIB, ("3.00 GiB", "1.00 GiB")),
        (int(0.0745 * GIB), int(0.0695 * GIB), ("0.074 GiB", "0.069 GiB")),
        (70_000_001, 70_000_000, ("70,000,001 bytes", "70,000,000 bytes")),
        (GIB, GIB, ("1.00 GiB", "1.00 GiB")),
    ],
)
def test_two_amounts(first: int, second: int, told: tuple[str, str]) -> None:
    assert two_amounts(first, second) == told
