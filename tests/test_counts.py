"""Whole numbers: those that are none, and those with more digits than Python reads."""

import pytest

from picompile.config import CompileOptions
from picompile.errors import UsageError
from picompile.predictors.profile import ProfileOptions
from picompile.predictors.train import TrainOptions
from picompile.quantities import parse_count, shortened


def test_counts_are_parsed() -> None:
    for text, number in {"0": 0, "007": 7, "9" * 18: 10**18 - 1, "0" * 5000 + "12": 12}.items():
        assert parse_count(text) == number
    for text in ("9" * 19, "9" * 5000, "", "-1", "1.0", "²", "٣"):
        assert parse_count(text) is None
    assert [shortened("x" * length) for length in (40, 41)] == ["x" * 40, "x" * 40 + "…"]


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        (CompileOptions, "context", 64.0),
        (CompileOptions, "sequences", 2.5),
        (CompileOptions, "chunk", True),
        (CompileOptions, "gate_tokens", "4096"),
        (ProfileOptions, "tokens", 1024.0),
        (ProfileOptions, "window", 128.0),
        (TrainOptions, "ranks", 8.0),
        (TrainOptions, "jobs", 1.5),
    ],
)
def test_options_that_must_be_whole_numbers(options: type, name: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"must be a whole number, not {value!r}"):
        options(**{name: value})
